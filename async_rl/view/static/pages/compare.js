// Several runs of one folder: curves over steps, tokens or time, settings that differ, evaluations.

import uPlot from "../vendor/uPlot.esm.js";
import { getJson } from "../api.js";
import { Chart } from "../charts.js";
import { el, fill, number, table } from "../dom.js";

const METRICS = [
  ["reward/mean", "Reward of trained groups"], ["rollout/reward", "Reward of all episodes"], ["train/loss", "Training loss"],
  ["held_out/loss", "Held-out loss"], ["staleness/mean", "Mean age"], ["perf/tok_s", "Trained tokens/s"],
  ["episode/length", "Length of answers"], ["policy/entropy_estimate", "Entropy"], ["optim/grad_norm", "Gradient norm"],
  ["idle/learner", "Idle learner"],
];
const AXES = { step: "step", "progress/tokens": "tokens", "progress/wall_s": "seconds of training" };

export function open(context) {
  const chosen = new Set((context.query.get("runs") || "").split(",").filter(Boolean));
  const axis = el("select", { onchange: () => draw() }, Object.entries(AXES).map(([value, label]) => el("option", { value }, label)));
  const runs = el("div", { class: "keyed" });
  const curves = el("div", { class: "charts" });
  const tables = el("div");
  let found = { runs: [], compared: [], settings: [] };
  let charts = [];

  async function load() {
    try {
      found = await getJson("/api/compare", { runs: [...chosen].join(","), names: METRICS.map(([name]) => name).join(",") });
    } catch (error) {
      return fill(tables, el("p", { class: "bad" }, error.message));
    }
    const own = found.compared[0].name;
    fill(runs, found.runs.map((name) => el("label", {}, el("input", {
      type: "checkbox", checked: name === own || chosen.has(name), disabled: name === own,
      onchange: (event) => choose(name, event.target.checked) }), name)));
    draw();
    return fill(tables, settings(found), evaluations(found.compared), paired(found.compared));
  }

  function choose(name, isChosen) {
    if (isChosen) chosen.add(name);
    else chosen.delete(name);
    history.replaceState(null, "", `#/compare?runs=${[...chosen].map(encodeURIComponent).join(",")}`);
    load();
  }

  function draw() {
    for (const chart of charts) chart.destroy();
    const known = METRICS.filter(([name]) => found.compared.some((run) => run.series.values[name]));
    charts = known.map(([name, title]) => new Chart({ title, names: [name], x: AXES[axis.value] }));
    fill(curves, charts.map((chart) => chart.element)); // before they are drawn: their width comes from the page
    known.forEach(([name], place) => {
      const shown = found.compared.filter((run) => run.series.values[name]);
      const [xs, ...columns] = uPlot.join(shown.map((run) => points(run.series, name, axis.value)));
      charts[place].draw(xs, shown.map((run, index) => ({ label: run.name, values: columns[index] })));
    });
  }

  load();
  return {
    element: el("div", {}, el("h2", {}, "Runs"), el("p", {}, "over ", axis), runs, curves, tables),
    keys: { r: ["load the runs again", load] },
    close() { for (const chart of charts) chart.destroy(); },
  };
}

/** [x, y] of a run, with growing x and without steps that lack one. */
function points(series, name, axis) {
  const xs = axis === "step" ? series.steps : series.values[axis] || [];
  const kept = [[], []];
  let last = -Infinity;
  series.values[name].forEach((value, index) => {
    if (value === null || xs[index] === null || xs[index] === undefined || xs[index] <= last) return;
    last = xs[index];
    kept[0].push(last);
    kept[1].push(value);
  });
  return kept;
}

function settings(found) {
  const names = found.compared.map((run) => run.name);
  const title = el("h2", {}, "Settings that differ");
  if (names.length < 2) return [title, el("p", { class: "dim" }, "Choose another run above.")];
  const problems = found.compared.filter((run) => run.problem).map((run) => el("p", { class: "bad" }, `${run.name}: ${run.problem}`));
  return [title, problems, table([["setting", "text"], ...names.map((name) => [name, "text"])], found.settings)];
}

/** The last evaluation of each run: every measure with its 95 % interval. */
function evaluations(compared) {
  const rows = new Map();
  compared.forEach((run, index) => {
    const last = run.evaluations[run.evaluations.length - 1];
    for (const [environment, each] of Object.entries(last?.environments || {})) {
      for (const [measure, value] of Object.entries(each.measures)) {
        const key = `${environment} ${measure}`;
        if (!rows.has(key)) rows.set(key, [key, ...compared.map(() => "–")]);
        const interval = value.low === null ? "" : ` [${number(value.low)}, ${number(value.high)}]`;
        rows.get(key)[index + 1] = `${number(value.mean)}${interval} at step ${last.step}`;
      }
    }
  });
  if (!rows.size) return null;
  return [el("h2", {}, "Last evaluations, with 95 % intervals"),
    table([["measure", ""], ...compared.map((run) => [run.name, ""])], [...rows.values()])];
}

/** Differences to the first run in the mean reward of tasks that both evaluated, task by task. */
function paired(compared) {
  const rows = compared.flatMap((run) => run.paired.map((each) => {
    const { mean, low, high, tasks } = each.difference;
    return [run.name, each.environment, `${each.other_step} against ${each.step}`, number(each.other_mean), number(each.mean),
      el("span", { class: each.is_clear ? (mean > 0 ? "good" : "bad") : "dim" },
        `${mean > 0 ? "+" : ""}${number(mean)} [${number(low)}, ${number(high)}]`), number(tasks)];
  }));
  if (!rows.length) return null;
  return [el("h2", {}, `Evaluations task by task, against ${compared[0].name}`),
    table([["run", ""], ["environment", ""], ["steps", ""], ["its mean", "number"], ["mean", "number"],
      ["difference, 95 % interval", ""], ["tasks", "number"]], rows)];
}
