"""What can be added to a run, by Trainer(callbacks=[...]): these, or callbacks of your own."""

from evenly.callbacks.averaging import EMA
from evenly.callbacks.base import Callback
from evenly.callbacks.early_stopping import EarlyStopping
from evenly.callbacks.gradients import GradientCapture, GradientNorm
from evenly.callbacks.learning_rate import LearningRateMonitor
from evenly.callbacks.logging import Logger
from evenly.callbacks.progress import Progress
from evenly.callbacks.tensorboard import TensorBoard
from evenly.callbacks.throughput import Throughput
from evenly.callbacks.timer import Timer

__all__ = [
    "EMA",
    "Callback",
    "EarlyStopping",
    "GradientCapture",
    "GradientNorm",
    "LearningRateMonitor",
    "Logger",
    "Progress",
    "TensorBoard",
    "Throughput",
    "Timer",
]
