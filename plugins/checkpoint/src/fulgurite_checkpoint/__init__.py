"""Checkpoints for Fulgurite, on Orbax: exact resume, the best and the latest, weights of other
runs."""

__tracebackhide__ = True

from fulgurite.errors import SaveError as SaveError

from fulgurite_checkpoint.files import resolve_root as resolve_root
from fulgurite_checkpoint.loading import load as load
from fulgurite_checkpoint.ownership import list_own as list_own
from fulgurite_checkpoint.plugin import Checkpointer as Checkpointer
from fulgurite_checkpoint.states import (
    restore_state as restore_state,
    save_state as save_state,
)
from fulgurite_checkpoint.weights import save_weights as save_weights
