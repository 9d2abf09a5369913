"""Records for MLflow: `Engine(plugins=[MLflowLogger("digits")])`."""

__tracebackhide__ = True

from fulgurite_mlflow.plugin import MLflowLogger as MLflowLogger
