"""Several data sources in one batch; `docs/sources-and-stages.md` is the guide."""

from fulgurite_data.together import Together

__all__ = ["Together"]
