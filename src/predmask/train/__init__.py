"""Training on one machine: configuration, trainer, run directory."""

from predmask.train.agreement import AgreementError
from predmask.train.config import Config, ConfigError
from predmask.train.presets import PRESETS
from predmask.train.run import Display, Summary, run
from predmask.train.trainer import StepResult, Trainer, TrainingError

__all__ = [
    "PRESETS",
    "AgreementError",
    "Config",
    "ConfigError",
    "Display",
    "StepResult",
    "Summary",
    "Trainer",
    "TrainingError",
    "run",
]
