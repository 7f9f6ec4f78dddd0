"""Checkpoints: a run's state in a folder that is whole or not there.

plain    state as JSON and tensors, without pickle
folder   saving, finding the newest that is whole, retention
"""

from evenly.checkpoint.folder import Checkpoint, CheckpointFolder

__all__ = ["Checkpoint", "CheckpointFolder"]
