"""Checkpoints: a run's state in folders that are whole or not there.

plain       state as JSON and tensors, without pickle
spread      which rank writes what
writing     one checkpoint on its way to disk, in a thread
saving      one after the other, and no error lost
folder      sealing, finding those that are whole
retention   which ones stay
best        which points are among the best, and so are saved
reading     a checkpoint, tensor by tensor
sources     weights in a run, a checkpoint, or files of other tools
weights     loading them into a model, exporting them to one file
"""

from evenly.checkpoint.folder import CheckpointFolder
from evenly.checkpoint.reading import Checkpoint
from evenly.checkpoint.retention import Retention

__all__ = ["Checkpoint", "CheckpointFolder", "Retention"]
