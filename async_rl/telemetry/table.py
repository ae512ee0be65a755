"""Every metric that exists: its name, unit and meaning. Documentation, Prometheus and the console all read this table.

`{...}` in a name stands for one word: an environment, a reason, an age.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

WORKER_METRICS = "worker-metrics"
"""The board's topic on which workers post their counters, and from which the run's one writer adds them up."""


class UnknownMetric(UserWarning):
    """Something logged a name that the table does not have. Where warnings are errors, this is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    name: str
    unit: str
    help: str

    @property
    def is_family(self) -> bool:
        return "{" in self.name


def _metric(name: str, unit: str, help: str) -> Metric:
    return Metric(name=name, unit=unit, help=help)


METRICS: tuple[Metric, ...] = (
    _metric("reward/mean", "", "mean reward of the rollouts that the step trains: of no group without a signal"),
    _metric("reward/std", "", "standard deviation of the step's rewards"),
    _metric("reward/{environment}/mean", "", "mean reward of one environment's rollouts"),
    _metric("reward/{environment}/{part}", "", "mean of one named part of an environment's reward"),
    _metric("episode/turns", "turns", "mean number of generations per rollout"),
    _metric("episode/length", "tokens", "mean number of sampled tokens per rollout"),
    _metric("episode/truncated", "share", "rollouts that a length limit cut"),
    _metric("episode/failed", "share", "rollouts that broke and have no reward"),
    _metric("guard/notches", "", "how far the guard is from what is configured, where there is one"),
    _metric("policy/loss", "", "the loss that was minimised"),
    _metric("policy/surrogate", "", "part of the loss that follows the advantages"),
    _metric("policy/kl_reference", "", "estimated KL divergence from the reference policy, where there is one"),
    _metric("policy/entropy", "nats", "mean entropy of the trained policy at sampled tokens, where it is asked for"),
    _metric("policy/tokens", "tokens", "sampled tokens in the loss"),
    _metric("policy/ratio_mean", "", "mean probability ratio, trained policy over sampling policy"),
    _metric("policy/ratio_std", "", "standard deviation of the probability ratio"),
    _metric("policy/ratio_min", "", "smallest probability ratio"),
    _metric("policy/ratio_max", "", "largest probability ratio"),
    _metric("policy/clip_frac", "share", "sampled tokens whose ratio a bound of the surrogate held"),
    _metric("policy/clip_low_frac", "share", "the same, where it was a lower bound"),
    _metric("policy/clip_high_frac", "share", "the same, where it was an upper bound"),
    _metric("policy/masked_frac", "share", "sampled tokens that a trust mask or the veto kept out of the loss"),
    _metric("policy/vetoed_frac", "share", "sequences that the veto kept out of the loss"),
    _metric("policy/corrected_frac", "share", "sampled tokens whose weight the correction cut or set to 0"),
    _metric("policy/correction_mean", "", "mean weight that the correction gives, before masks and the veto"),
    _metric("policy/ess", "share", "effective sample size of the ratios, as a share of the tokens"),
    _metric("policy/ess_sequence", "share", "the same of whole sequences, each with the product of its ratios"),
    _metric("policy/chi2", "", "mean squared ratio of tokens, minus 1"),
    _metric("policy/chi2_sequence", "", "mean squared ratio of whole sequences, minus 1"),
    _metric("policy/kl_behave", "nats", "estimated KL divergence from the sampling to the trained policy"),
    _metric("policy/kl_current", "nats", "the same from the trained to the sampling policy"),
    _metric("policy/kl_proximal", "nats", "estimated KL divergence from the policy that anchors the ratio to the trained one"),
    _metric("policy/perplexity_ratio", "", "perplexity of the sampled tokens, trained policy over sampling policy"),
    _metric("policy/entropy_estimate", "nats", "entropy of the trained policy, estimated from the sampled tokens alone"),
    _metric("policy/logprob_mean", "nats", "mean logprob of the sampled tokens under the trained policy"),
    _metric("policy/logprob_abs_diff", "nats", "mean |logprob when trained - logprob when sampled|"),
    _metric("policy/logprob_abs_diff_max", "nats", "largest |logprob when trained - logprob when sampled|"),
    _metric("policy/age_{age}/tokens", "tokens", "sampled tokens that are 0, 1, 2_3, 4_7 or 8_up versions old"),
    _metric("policy/age_{age}/ratio_mean", "", "mean probability ratio of these tokens"),
    _metric("policy/age_{age}/ess", "share", "effective sample size of their ratios"),
    _metric("policy/age_{age}/kl_behave", "nats", "KL divergence from the sampling to the trained policy, estimated from them"),
    _metric("policy/age_{age}/kl_current", "nats", "the same from the trained to the sampling policy"),
    _metric("policy/age_{age}/logprob_abs_diff", "nats", "mean |difference of logprobs|; at age 0: engine against learner"),
    _metric("policy/age_{age}/clip_frac", "share", "of them whose ratio a bound of the surrogate held"),
    _metric("policy/age_{age}/masked_frac", "share", "of them that a trust mask or the veto kept out of the loss"),
    _metric("policy/skipped_updates", "updates", "of the step, skipped for a non-finite loss or gradient"),
    _metric("value/loss", "", "the critic's loss"),
    _metric("value/mean", "", "mean value that the critic gives"),
    _metric("value/return_mean", "", "mean of the returns that it learns from"),
    _metric("value/explained_variance", "", "share of the returns' variance that the values foretell"),
    _metric("value/clip_frac", "share", "tokens whose value moved too far to follow its gradient"),
    _metric("value/grad_norm", "", "gradient norm of a critic of its own, before clipping"),
    _metric("value/lr", "", "its learning rate"),
    _metric("value/skipped_updates", "updates", "of it in the step, skipped for a non-finite loss or gradient"),
    _metric("train/loss", "", "what `async-rl train` minimised"),
    _metric("train/nll", "nats", "mean negative logprob of the trained tokens; with pairs, of those of chosen answers"),
    _metric("train/perplexity", "", "exp of that mean"),
    _metric("train/tokens", "tokens", "tokens trained on"),
    _metric("train/pairs", "pairs", "pairs trained on"),
    _metric("train/accuracy", "share", "pairs whose chosen answer gained more on the reference (dpo), or scores more (rm)"),
    _metric("train/margin", "", "mean implicit reward (dpo) or score (rm) of chosen answers minus that of rejected ones"),
    _metric("train/reward_chosen", "", "mean implicit reward of chosen answers"),
    _metric("train/reward_rejected", "", "mean implicit reward of rejected answers"),
    _metric("train/score_mean", "", "mean score of all answers"),
    _metric("train/epoch", "", "how often the table was gone through"),
    _metric("train/dropped", "examples", "of the step that were too long, and left out"),
    _metric("held_out/{measure}", "", "the same as train/..., of the table that nobody trains on"),
    _metric("batch/advantage_abs", "", "mean |advantage| of the step's samples"),
    _metric("batch/no_signal_frac", "share", "samples whose advantage is 0"),
    _metric("batch/sequences", "samples", "samples packed into the step"),
    _metric("batch/trained_tokens", "tokens", "sampled tokens that are trained on"),
    _metric("batch/tokens", "tokens", "all tokens of the packed rows, prompts included"),
    _metric("batch/bins", "bins", "packed micro-batch rows"),
    _metric("batch/oversize", "bins", "samples longer than batch.bin_tokens, each in a row of its own"),
    _metric("batch/too_long", "samples", "dropped, because the model has fewer positions than they have tokens"),
    _metric("batch/fill", "share", "of the packed rows' capacity that holds tokens"),
    _metric("batch/imbalance", "", "tokens of the fullest data-parallel shard over the mean of all"),
    _metric("batch/lock_step", "", "cost of the costliest of the bins that ranks run side by side, over the mean of them"),
    _metric("staleness/mean", "versions", "mean age of the step's groups"),
    _metric("staleness/p95", "versions", "95th percentile of the age"),
    _metric("staleness/max", "versions", "largest age"),
    _metric("staleness/in_flight", "versions", "mean part of the age gained while being rolled out"),
    _metric("staleness/in_queue", "versions", "mean part of the age gained while waiting in the buffer"),
    _metric("staleness/age_{age}", "groups", "groups of the step that had exactly this age"),
    _metric("staleness/dropped", "groups", "groups dropped for being too old, since the run began"),
    _metric("buffer/depth", "groups", "groups ready to be trained on"),
    _metric("buffer/again", "groups", "groups that have trained and are ready to train another step"),
    _metric("buffer/reserved", "groups", "tickets being rolled out"),
    _metric("buffer/slots_used", "slots", "slots that are charged"),
    _metric("buffer/bytes", "bytes", "payload bytes held"),
    _metric("buffer/dropped/{reason}", "groups", "tickets that ended untrained, since the run began"),
    _metric("buffer/quarantined", "groups", "payloads that failed validation, since the run began"),
    _metric("buffer/kept", "groups", "spent groups whose payloads are retained"),
    _metric(
        "buffer/lost_to_rollback", "groups", "spent, then lost with a damaged or moved checkpoint: their tasks are rolled again"
    ),
    _metric("buffer/expired", "groups", "spent groups whose payloads went before they were archived or discarded"),
    _metric("buffer/owed", "uses", "samples_per_insert x inserts - uses"),
    _metric("rollout/inflight", "groups", "groups being rolled out by all workers"),
    _metric("rollout/tok_s", "tokens/s", "tokens that all workers sample per second"),
    _metric("rollout/reward", "", "mean reward of all episodes that ended since the row before, also of groups never trained"),
    _metric("rollout/episodes", "rollouts", "episodes that workers finished, since they started"),
    _metric("rollout/forked", "samples", "samples begun because a history was not a prefix, since the workers started"),
    _metric("rollout/failures/{boundary}", "rollouts", "episodes that broke at this boundary, since the workers started"),
    _metric("rollout/refills", "rollouts", "failed episodes that were played again for their group, since the workers started"),
    _metric("rollout/rests", "times", "environments that failed too often and were left alone, since the workers started"),
    _metric("rollout/left_behind", "times", "tasks and processes of episodes that had to be ended for them"),
    _metric("rollout/left_behind/{what}", "times", "the same by what it was: tasks, processes, stubborn (tasks that go on)"),
    _metric("rollout/lease_lost", "groups", "groups that workers gave up because their ticket was lost"),
    _metric("rollout/workers", "workers", "workers that are listed"),
    _metric("engine/running", "generations", "generations that are being sampled"),
    _metric("engine/waiting", "generations", "generations that wait for room in an engine"),
    _metric("engine/kv_used", "share", "of the KV cache that running generations hold"),
    _metric("engine/prefix_tokens_reused", "tokens", "of prompts that were not computed, because somebody began alike"),
    _metric("engine/preemptions", "times", "generations gave up their place in the KV cache, to be taken up again later"),
    _metric("environment/{environment}/share", "share", "groups of the step that are this environment's"),
    _metric("environment/{environment}/groups", "groups", "groups of it that were committed, since the workers started"),
    _metric("environment/{environment}/failed", "rollouts", "episodes of it that broke, since the workers started"),
    _metric("environment/{environment}/reward", "", "mean reward of its episodes, since the workers started"),
    _metric("environment/{environment}/unavailable", "tickets", "handed on by workers that cannot play it"),
    _metric("gateway/sessions", "episodes", "episodes that have an endpoint now"),
    _metric("gateway/generations", "generations", "generations that agents wait for now"),
    _metric("gateway/requests", "requests", "requests of agents, since the worker started"),
    _metric("gateway/refused", "requests", "requests that were answered with an error"),
    _metric("gateway/tokens", "tokens", "tokens sampled for agents"),
    _metric("gateway/forks", "prompts", "prompts of ended episodes that went on from nothing sampled"),
    _metric("eval/step", "steps", "optimizer steps behind the weights that the row's evaluation is of"),
    _metric("eval/version", "", "the version of those weights"),
    _metric(
        "eval/{environment}/{measure}", "", "of an evaluation: mean@K, pass@K, greedy, _low and _high (docs/evaluation.md)"
    ),
    _metric("weights/version", "", "the version that the step produced"),
    _metric("weights/live", "", "the version that went live last"),
    _metric("weights/pushes", "times", "versions that went live, since the learner started"),
    _metric("weights/coalesced", "versions", "packed, but overtaken by a newer one before their push began, since it started"),
    _metric("weights/pinned", "", "1 while a person keeps newer versions from going out"),
    _metric("weights/wait_s", "s", "from the packing of the version that went live last to the start of its push"),
    _metric("weights/push_s", "s", "from the start of a push until every worker had staged it"),
    _metric("weights/bytes", "bytes", "bytes of the last push, per worker"),
    _metric("weights/workers", "workers", "workers that received the last push"),
    _metric("weights/dropped", "workers", "workers that the last push had to leave behind"),
    _metric("checkpoint/write_s", "s", "from the copies of the last checkpoint until it was durable, beside the training"),
    _metric("checkpoint/stall_s", "s", "for which training stood still for the last checkpoint"),
    _metric("checkpoint/bytes", "bytes", "of the last checkpoint, all ranks' files"),
    _metric("checkpoint/failed", "times", "checkpoints that could not be written, since the learner started"),
    _metric("metrics/dropped", "rows", "of metrics.jsonl that the disk refused, since the learner started"),
    _metric("samples/dropped", "rows", "of samples.jsonl that the disk refused, since the learner started"),
    _metric("time/step", "s", "training the step and handing its weights to the publisher"),
    _metric("time/pack", "s", "packing the step's groups, while the step before it computed"),
    _metric("time/wait_data", "s", "waiting for groups"),
    _metric("idle/learner", "share", "of the step's time that the learner waited for groups"),
    _metric("perf/tok_s", "tokens/s", "sampled tokens trained per second"),
    _metric("optim/lr", "", "learning rate"),
    _metric("optim/grad_norm", "", "gradient norm before clipping"),
    _metric("optim/skipped", "", "1 when the step was skipped for a non-finite loss or gradient"),
    _metric("progress/tokens", "tokens", "sampled tokens trained, since the run began"),
    _metric("progress/samples", "rollouts", "rollouts trained, since the run began"),
    _metric("progress/wall_s", "s", "since training began"),
)

_EXACT = {metric.name: metric for metric in METRICS if not metric.is_family}
_FAMILIES = [
    (re.compile(re.sub(r"\\{.*?\\}", r"[^/]+", re.escape(metric.name))), metric) for metric in METRICS if metric.is_family
]


@cache
def find_metric(name: str) -> Metric | None:
    """The row of the table for a logged name."""
    if name in _EXACT:
        return _EXACT[name]
    return next((metric for pattern, metric in _FAMILIES if pattern.fullmatch(name)), None)
