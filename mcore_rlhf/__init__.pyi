"""The public names, and where each lives: what type checkers read, and what ``mcore_rlhf`` imports them by."""

from .consolidate import load_fp32_state_dict as load_fp32_state_dict
from .convert import ConvertOptions as ConvertOptions
from .convert import Job as Job
from .convert import convert as convert_checkpoint
from .convert import prepare as prepare_conversion
from .engines.adapter import AdapterEngine as AdapterEngine
from .engines.deepspeed import DeepSpeedEngine as DeepSpeedEngine
from .engines.fsdp import FsdpEngine as FsdpEngine
from .engines.megatron import MegatronEngine as MegatronEngine
from .engines.plain import TorchEngine as TorchEngine
from .errors import CheckpointError as CheckpointError
from .families.options import ReadOptions as ReadOptions
from .families.options import WriteOptions as WriteOptions
from .families.source import Source as Source
from .formats.registry import open_checkpoint as open_checkpoint
from .manager.config.options import kl_controller as kl_controller
from .manager.config.options import manager_options as manager_options
from .manager.config.options import prompt_sampler as prompt_sampler
from .manager.config.run import RunConfig as RunConfig
from .manager.config.run import load_run_config as load_run_config
from .manager.rlhf.controls import KL_CONTROLLERS as KL_CONTROLLERS
from .manager.rlhf.controls import SCHEDULES as SCHEDULES
from .manager.rlhf.controls import AdaptiveKL as AdaptiveKL
from .manager.rlhf.controls import ConstantSchedule as ConstantSchedule
from .manager.rlhf.controls import CosineSchedule as CosineSchedule
from .manager.rlhf.controls import FixedKL as FixedKL
from .manager.rlhf.controls import KLController as KLController
from .manager.rlhf.controls import LinearSchedule as LinearSchedule
from .manager.rlhf.controls import Schedule as Schedule
from .manager.rlhf.journal import RolloutJournal as RolloutJournal
from .manager.rlhf.journal_writer import JournalWriter as JournalWriter
from .manager.rlhf.loader_prompts import LoaderPrompts as LoaderPrompts
from .manager.rlhf.pieces import BestMetric as BestMetric
from .manager.rlhf.pieces import Buffer as Buffer
from .manager.rlhf.pieces import InFlightPrompt as InFlightPrompt
from .manager.rlhf.pieces import RunningStatistics as RunningStatistics
from .manager.rlhf.prompts import Prompt as Prompt
from .manager.rlhf.replay import buffer_of as replay_buffer_of
from .manager.rlhf.replay import state_of as replay_state_of
from .manager.rlhf.rollouts import Rollout as Rollout
from .manager.rlhf.sampler import PromptSampler as PromptSampler
from .manager.rlhf.state import RlhfState as RlhfState
from .manager.run.commit import Transaction as Transaction
from .manager.run.commit import new_transaction as new_transaction
from .manager.run.events import EventLog as EventLog
from .manager.run.manager import CheckpointManager as CheckpointManager
from .manager.run.manager import Resumed as Resumed
from .manager.run.options import ManagerOptions as ManagerOptions
from .manager.run.options import Mirror as Mirror
from .manager.run.policies import AnyOf as AnyOf
from .manager.run.policies import AtEnd as AtEnd
from .manager.run.policies import BeforeDeadline as BeforeDeadline
from .manager.run.policies import Deadline as Deadline
from .manager.run.policies import EveryMinutes as EveryMinutes
from .manager.run.policies import EverySteps as EverySteps
from .manager.run.policies import OnSignal as OnSignal
from .manager.run.policies import SavePoint as SavePoint
from .manager.run.policies import SavePolicy as SavePolicy
from .manager.run.retention import KeepBest as KeepBest
from .manager.run.retention import KeepEvery as KeepEvery
from .manager.run.retention import KeepLast as KeepLast
from .manager.run.retention import KeepRule as KeepRule
from .manager.run.retention import Retention as Retention
from .manager.run.retention import SizeCap as SizeCap
from .manager.run.steps import Step as Step
from .manager.run.world import Worlds as Worlds
from .storage.appending import Pace as JournalPace
from .verify.checkpoint import Depth as Depth
from .verify.checkpoint import verify as verify_checkpoint
from .weights import iter_weights as iter_weights

# A name that is imported as itself is exported; one that has another name here must be listed.
__all__ = [
    "JournalPace",
    "convert_checkpoint",
    "prepare_conversion",
    "replay_buffer_of",
    "replay_state_of",
    "verify_checkpoint",
]
__version__: str
