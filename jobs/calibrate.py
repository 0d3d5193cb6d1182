"""`plan --calibrate`: loads the job's model here and times a few of its steps."""

from batchmla.engine.calibration import StepTimes
from batchmla.engine.config import EngineConfig
from batchmla.engine.drafts import engine_costs
from batchmla.engine.engine import load_engine, read_config
from batchmla.engine.trial import trial
from batchmla.errors import DeviceError
from batchmla.jobs.options import engine_options
from batchmla.jobs.spec import JobSpec
from batchmla.text.tokenizer import Tokenizer
from batchmla.weights.folder import find_model


def calibrate_job(spec: JobSpec, config: EngineConfig, prompt_tokens: float) -> StepTimes | None:
    """Times of the engine that `config` describes; a `DeviceError` where it does not fit."""
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
            vocab_size=vocab_size,
            prompt_tokens=round(prompt_tokens),
        )
    finally:
        engine.close()
