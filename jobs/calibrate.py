"""`plan --calibrate`: loads the job's model here and times a few of its steps."""

import numpy as np

from batchmla.core import TokenIds
from batchmla.engine.calibration import StepTimes
from batchmla.engine.config import EngineConfig
from batchmla.engine.drafts import engine_costs
from batchmla.engine.engine import load_engine
from batchmla.engine.trial import trial
from batchmla.errors import DeviceError
from batchmla.jobs.counts import RowCounts
from batchmla.jobs.options import engine_options
from batchmla.jobs.plan_choice import mix_of
from batchmla.jobs.spec import JobSpec
from batchmla.text.tokenizer import Tokenizer
from batchmla.weights.folder import find_model, read_config

_ANY_TOKENS = 4096


def calibrate_job(spec: JobSpec, config: EngineConfig, counts: RowCounts) -> StepTimes | None:
    """Times of the engine that `config` describes, with pieces of the job's own prompts: which
    experts are read depends on the text. A `DeviceError` where it does not fit."""
    if config.misfit is not None:
        raise DeviceError(config.misfit)
    folder = find_model(spec.model.path, spec.model.revision)
    vocab_size = len(Tokenizer.load(folder))
    engine = load_engine(engine_options(spec, folder), vocab_limit=vocab_size)
    try:
        return trial(
            engine,
            config,
            engine_costs(read_config(folder), config),
            token_ids=_ids(counts, vocab_size),
            prompt_tokens=round(mix_of(counts).prompt_tokens),
        )
    finally:
        engine.close()


def _ids(counts: RowCounts, vocab_size: int) -> TokenIds:
    """Of the job's prompts, or any where it has none."""
    if counts.lengths is not None and len(counts.lengths.token_ids):
        return counts.lengths.token_ids
    return np.random.default_rng(0).integers(0, vocab_size, _ANY_TOKENS).astype(np.int32)
