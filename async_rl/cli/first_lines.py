"""The first output of a run, printed before slow imports: folder, model, device, metrics, logs."""

from __future__ import annotations

from async_rl.config import Config, ModelConfig
from async_rl.config.training import AnyRun
from async_rl.launch.commands import computes_on_cpu


def first_lines(config: AnyRun) -> str:
    rows = [
        ("folder", str(config.run_folder)),
        ("model", _model(config.model)),
        ("device", ("cpu" if computes_on_cpu(config) else "cuda") + (" (chosen by auto)" if config.device == "auto" else "")),
        ("metrics", ", ".join(_metrics(config))),
    ]
    if isinstance(config, Config):
        rows.append(("logs", f"{config.run_folder}/logs (workers, buffer, evaluator)"))
    return "\n".join([f"run {config.run.name}", *(f"  {name:<8} {value}" for name, value in rows)])


def _model(model: ModelConfig) -> str:
    if model.size is None:
        return f"{model.name} at {model.revision}" if model.name else str(model.folder)
    size = model.size
    return f"random weights, hidden {size.hidden}, {size.layers} layers, {size.heads} heads"


def _metrics(config: AnyRun) -> list[str]:
    wanted = config.metrics
    return [
        str(config.run_folder / "metrics.jsonl"),
        *([f"http://{wanted.prometheus_host}:{wanted.prometheus_port}/metrics"] if wanted.prometheus_port else []),
        *([f"W&B project {wanted.wandb_project}"] if wanted.wandb_project else []),
        *([f"trackio project {wanted.trackio_project}"] if wanted.trackio_project else []),
        *([f"MLflow experiment {wanted.mlflow_experiment}"] if wanted.mlflow_experiment else []),
        *([f"{config.run_folder}/tensorboard"] if wanted.tensorboard else []),
    ]
