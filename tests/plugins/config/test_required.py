"""Values that must be set, and what is computed from them."""

from typing import Any

import fulgurite_config as fc
import pytest
from fulgurite_config import REQUIRED, ConfigError, L, Required, apply_overrides, resolve


def make_config() -> Any:
    cfg = L(steps=Required("the number of updates"), model=REQUIRED, sizes=[1, Required("a size")])
    cfg.aux.scale = Required("a scale")
    cfg.half = cfg.ref.steps // 2
    cfg.width = cfg.ref.model.width
    cfg.total = fc.apply(sum, cfg.ref.sizes)
    cfg.scaled = cfg.ref.aux.scale * 2
    cfg.chosen = cfg.ref.sizes[cfg.ref.steps]
    return cfg


def test_what_is_computed_from_missing_values_is_reported_with_them() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(make_config())
    assert str(caught.value) == (
        "values are missing: steps (the number of updates); model; sizes[1] (a size); "
        "half = (cfg.ref.steps // 2) (the number of updates); width = cfg.ref.model.width; "
        "total = apply(builtins:sum, cfg.ref.sizes) (a size); "
        "scaled = (cfg.ref.aux.scale * 2) (a scale); "
        "chosen = cfg.ref.sizes[cfg.ref.steps] (the number of updates)"
    )


def test_what_is_computed_from_a_missing_value_reads_as_that() -> None:
    cfg = make_config()
    assert cfg.half == Required("the number of updates")
    assert cfg.width == REQUIRED
    overrides = ["steps=1", "model={'width': 3}", "sizes[1]=4", "aux.scale=5"]
    apply_overrides(cfg, overrides)
    resolved: Any = resolve(cfg)
    values = (resolved.half, resolved.width, resolved.total, resolved.scaled, resolved.chosen)
    assert values == (0, 3, 5, 10, 4)
