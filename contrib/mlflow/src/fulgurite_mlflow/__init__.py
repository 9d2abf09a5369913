"""Records for MLflow: `Engine(plugins=[MLflowLogger("digits")])`."""

from fulgurite_mlflow.plugin import MLflowLogger as MLflowLogger
