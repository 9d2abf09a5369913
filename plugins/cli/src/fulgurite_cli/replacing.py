"""Evaluators of a run's configuration that are replaced or added: by a program whose configuration
has `evaluators` and no `engine`."""

from typing import Any

from fulgurite_config import ConfigError, Node, copy, get_node_state, load_targets

EVALUATORS = "evaluators"


def has_only_evaluators(config: Any) -> bool:
    """Return whether a configuration says what evaluates a run, and not how one is trained."""
    if not isinstance(config, Node):
        return False
    keywords = get_node_state(config).keywords
    return EVALUATORS in keywords and "engine" not in keywords


def replace_evaluators(config: Node, program_config: Node) -> None:
    """Put evaluators among the plugins of a run's configuration, each in the place of one that has
    its name.

    Args:
        config: of the run, whose targets are loaded; changed in place.
        program_config: has the list `evaluators`.

    Raises:
        ConfigError: one of the two is not of that form.
    """
    evaluators = copy(program_config).__config_get__(EVALUATORS)
    engine = get_node_state(config).keywords.get("engine")
    plugins = (
        get_node_state(engine).keywords.get("plugins", []) if isinstance(engine, Node) else None
    )
    if not isinstance(engine, Node) or not isinstance(plugins, list):
        raise ConfigError("the run's configuration has no engine with a list of plugins")
    if not isinstance(evaluators, list) or not all(isinstance(node, Node) for node in evaluators):
        raise ConfigError("evaluators must be a list of calls: [L(Evaluator, 'test', data), ...]")
    for evaluator in evaluators:
        load_targets(evaluator)
    replaced = {_get_identity(evaluator) for evaluator in evaluators}
    other_plugins = [plugin for plugin in plugins if _get_identity(plugin) not in replaced]
    engine.plugins = [*other_plugins, *evaluators]


def _get_identity(plugin: Any) -> Any:
    """Return what is called and under which name; None for a plugin without a name."""
    if not isinstance(plugin, Node):
        return None
    name = get_node_state(plugin).keywords.get("name")
    return (get_node_state(plugin).target, name) if isinstance(name, str) else None
