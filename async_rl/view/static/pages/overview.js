// What the run does now: state of every process, what it waits for, warnings, and the curves that people look at first.

import { ChartGrid, Chart } from "../charts.js";
import { ago, el, fill, hasEnded, number, share, shareBar, table, tile } from "../dom.js";

const CHARTS = [
  { title: "Reward of trained and of all groups", names: ["reward/mean", "rollout/reward", "train/loss", "held_out/loss"],
    labels: { "reward/mean": "trained", "rollout/reward": "all episodes", "train/loss": "loss", "held_out/loss": "held-out loss" } },
  { title: "Age of trained groups", unit: "versions", names: ["mean:staleness/mean", "staleness/max"] },
  { title: "Throughput", unit: "tokens/s", names: ["perf/tok_s", "rollout/tok_s"],
    labels: { "perf/tok_s": "trained in the step", "rollout/tok_s": "sampled, last 10 s" } },
  { title: "Idle learner by cause", unit: "share of its time", stacked: true, range: [0, 1],
    names: ["mean:idle/no_groups", "mean:idle/pushing", "mean:idle/checkpoint", "mean:idle/other"],
    labels: { "idle/no_groups": "no groups ready", "idle/pushing": "weights not packed or not live", "idle/checkpoint": "checkpoint" } },
  { title: "Length of answers", unit: "tokens", names: ["episode/length"] },
];

const IDLE = CHARTS.findIndex((chart) => chart.title.startsWith("Idle"));

export function open() {
  const said = el("div");
  const tiles = el("div", { class: "tiles" });
  const tables = el("div");
  const grid = new ChartGrid(CHARTS);
  const evaluated = new Chart({ title: "Evaluations", names: [] });
  grid.element.prepend(evaluated.element);
  return {
    element: el("div", {}, said, tiles, grid.element, tables),
    names: grid.names,
    update(store) {
      fill(said, sentences(store.state));
      fill(tiles, figures(store.state));
      grid.charts[1].spec.bound = store.state.max_age;
      grid.charts[IDLE].remark(store.state.slowdowns.map((each) => each.remark).filter(Boolean).join("; "));
      grid.update(store);
      drawEvaluations(evaluated, store.evaluations);
      fill(tables, details(store.state));
    },
    close() { grid.destroy(); evaluated.destroy(); },
  };
}

function sentences(state) {
  const line = (text, kind = "") => (text ? el("p", { class: `sentence ${kind}` }, text) : null);
  return [
    line(state.sentence, { running: "good", failed: "bad", lost: "bad" }[state.kind]),
    line(state.waits_for ? `Waits: ${state.waits_for}.` : ""),
    ...(state.slowdowns.length ? state.slowdowns.map(slowdown) : [line(state.slowest_part)]),
    ...state.let_go.map((text) => el("div", { class: "banner" }, text)),
    state.problem ? el("div", { class: "banner" }, `config.yaml: ${state.problem}`) : null,
  ];
}

/** Why the run is not faster, and where to look. */
function slowdown({ sentence, page }) {
  return el("p", { class: "sentence" }, `${sentence} `, el("a", { href: `#/${page}` }, page.split("?")[0]));
}

function figures(state) {
  const { latest, means } = state;
  const hasReward = "reward/mean" in latest;
  const whole = (value) => (value === "–" ? "" : `whole run: ${value}`);
  return [
    tile("step", `${state.step ?? "–"}${state.steps ? ` / ${state.steps}` : ""}`, "#/learner"),
    tile(hasReward ? "reward, last step" : "loss, last step", number(latest["reward/mean"] ?? latest["train/loss"]), "#/learner",
      hasReward && means.reward !== null ? `last ${Math.min(means.steps, state.step)} steps: ${number(means.reward)}` : ""),
    tile("age: mean, max, bound", `${number(latest["staleness/mean"])}, ${number(latest["staleness/max"])}, ${number(state.max_age)}`,
      "#/staleness", "last step"),
    tile("live version", number(state.live ? state.live.live_version : latest["weights/live"]), "#/fleet"),
    tile("pace: steps, slots", `${number(latest["pace/target"])}, ${number(latest["pace/slots"])}`, "#/staleness"),
    tile("trained tokens/s, last step", number(latest["perf/tok_s"]), "#/learner", whole(number(means.tok_s))),
    tile("idle learner, last step", share(latest["idle/learner"]), "#/learner", whole(share(means.idle))),
    tile("workers", number(state.live ? state.live.workers.filter((each) => each.is_listed).length : latest["rollout/workers"]), "#/fleet",
      hasEnded(state) ? "before it ended" : ""),
    tile("tokens trained", number(latest["progress/tokens"]), "#/staleness"),
    tile("training time", ago(latest["progress/wall_s"]), "#/learner"),
  ];
}

function details(state) {
  const counted = state.warnings.map((each) => [el("a", { href: `#/${each.page}` }, each.cause), number(each.times), "metrics"]);
  const logged = state.logged.map((each) => [each.text, number(each.times), `${each.role}, ${ago(state.now - each.last)} ago`]);
  const gone = hasEnded(state) ? el("span", { class: "dim" }, "has ended") : el("span", { class: "bad" }, "is gone");
  const processes = state.processes.map((each) => [each.name,
    each.is_alive ? el("span", { class: "good" }, "lives") : gone.cloneNode(true), String(each.pid)]);
  const workers = (state.live ? state.live.workers : []).map((each) => [
    el("a", { href: "#/fleet" }, each.id), 
    el("span", { class: each.is_listed ? "good" : "bad" }, each.is_listed ? "listed" : "gone"), `version ${number(each.version)}`]);
  return [
    el("h2", {}, "Processes"),
    processes.length + workers.length
      ? table([["process", ""], ["state", ""], ["id or version", ""]], [...processes, ...workers])
      : el("p", { class: "dim" }, "None was started on this machine by `async-rl run`."),
    state.live_problem ? el("p", { class: "dim" }, state.live_problem) : null,
    el("h2", {}, "Warnings"),
    counted.length + logged.length
      ? table([["cause", "text"], ["times", "number"], ["from", ""]], [...counted, ...logged])
      : el("p", { class: "dim" }, "None in the metrics, and none was logged."),
    state.fates.length ? [el("h2", {}, el("a", { href: "#/staleness" }, "What became of the tokens")), shareBar(state.fates)] : null,
  ];
}

/** The first measure of each environment as points, with its 95 % interval as thin lines. */
function drawEvaluations(chart, evaluations) {
  const steps = evaluations.map((each) => each.step);
  const environments = [...new Set(evaluations.flatMap((each) => Object.keys(each.environments)))];
  const lines = environments.flatMap((name) => {
    const measured = evaluations.map((each) => each.environments[name]?.measures || {});
    const measure = Object.keys(measured.find((each) => Object.keys(each).length) || {})[0];
    const values = (part) => measured.map((each) => each[measure]?.[part] ?? null);
    return [{ label: `${name} ${measure}`, values: values("mean") }, 
      { label: "low", values: values("low"), isDim: true }, { label: "high", values: values("high"), isDim: true }];
  });
  chart.element.hidden = !lines.length;
  chart.draw(steps, lines);
}
