// The objective's diagnostics, also by age; gradients, packing, and where the time of a step goes.

import { ChartGrid, PUSH } from "../charts.js";
import { el } from "../dom.js";

const ages = (measure) => `policy/age_*/${measure}`;
const CHARTS = [
  { title: "Loss", names: ["policy/loss", "policy/surrogate", "value/loss", "train/loss", "held_out/loss"] },
  { title: "Gradient norm", names: ["optim/grad_norm", "value/grad_norm"], labels: { "optim/grad_norm": "policy", "value/grad_norm": "critic" } },
  { title: "Learning rate", names: ["optim/lr", "value/lr"] },
  { title: "Entropy", unit: "nats", names: ["policy/entropy_estimate", "policy/entropy"] },
  { title: "Effective sample size by age", unit: "share", range: [0, 1], names: [ages("ess"), "policy/ess"], labels: { "policy/ess": "all" } },
  { title: "KL(sampling || trained) by age", unit: "nats", names: [ages("kl_behave"), "policy/kl_behave"], labels: { "policy/kl_behave": "all" } },
  { title: "Clipped tokens by age", unit: "share", names: [ages("clip_frac"), "policy/clip_frac"], labels: { "policy/clip_frac": "all" } },
  { title: "Log-probability difference by age", unit: "nats; age 0: engine and learner", names: [ages("logprob_abs_diff")] },
  { title: "Largest ratio of trained to sampling policy", log: true, names: ["policy/ratio_max"] },
  { title: "Tokens left out of the loss", unit: "share", names: ["policy/masked_frac", "policy/vetoed_frac", "batch/no_signal_frac"] },
  { title: "Seconds of a step", unit: "s", stacked: true, names: ["mean:time/step", "mean:time/wait_data"],
    labels: { "time/step": "training", "time/wait_data": "waiting for groups" } },
  { title: "Beside the step", unit: "s", names: ["time/pack", "weights/push_s", "weights/wait_s", "checkpoint/stall_s", "checkpoint/write_s"],
    labels: { "time/pack": "packing", ...PUSH, "checkpoint/stall_s": "checkpoint stall", "checkpoint/write_s": "checkpoint write" } },
  { title: "Packing", unit: "share of the rows' capacity", range: [0, 1], names: ["batch/fill"] },
  { title: "Imbalance", unit: "largest / mean", names: ["batch/imbalance", "batch/lock_step"] },
  { title: "Tokens of a step", unit: "tokens", names: ["batch/trained_tokens", "batch/tokens"], labels: { "batch/trained_tokens": "sampled", "batch/tokens": "with prompts" } },
  { title: "Memory of rank 0", unit: "bytes", names: ["memory/gpu", "memory/host"], labels: { "memory/gpu": "tensors on the GPU, at most", "memory/host": "process" } },
  { title: "Payloads in the buffer", unit: "bytes", names: ["buffer/bytes"] },
];

export function open() {
  const grid = new ChartGrid(CHARTS);
  return {
    element: el("div", {}, grid.element),
    names: grid.names,
    update(store) {
      grid.update(store);
      for (const chart of grid.charts) chart.element.hidden = !chart.plot;
    },
    close() { grid.destroy(); },
  };
}
