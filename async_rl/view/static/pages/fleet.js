// Workers: what each serves and does, pushes of weights, and what went wrong.

import { getJson } from "../api.js";
import { ChartGrid } from "../charts.js";
import { ago, el, fill, number, share, table } from "../dom.js";
import { lanes, pushes } from "../lanes.js";

const CHARTS = [
  { title: "Workers", names: ["rollout/workers", "weights/workers", "weights/dropped"],
    labels: { "rollout/workers": "present", "weights/workers": "got the last push", "weights/dropped": "left out of it" } },
  { title: "Sampled tokens", unit: "tokens/s, all workers", names: ["rollout/tok_s"] },
  { title: "Generations", names: ["engine/running", "engine/waiting"] },
  { title: "KV cache in use", unit: "share", range: [0, 1], names: ["engine/kv_used"] },
  { title: "Groups being rolled out", unit: "groups", names: ["rollout/inflight"] },
  { title: "Push of a version", unit: "s", names: ["weights/push_s", "weights/wait_s"], labels: { "weights/push_s": "push", "weights/wait_s": "wait before it" } },
  { title: "Size of a push", unit: "bytes per worker", names: ["weights/bytes"] },
  { title: "Failed episodes by boundary, since the workers started", names: ["rollout/failures/*"] },
  { title: "Reward by environment", names: ["environment/*/reward"] },
  { title: "Groups of the step by environment", unit: "share", stacked: true, range: [0, 1], names: ["mean:environment/*/share"] },
];
const COUNTERS = [["groups", "inflight"], ["generations", "engine/running"], ["waiting", "engine/waiting"], ["episodes", "episodes"]];

export function open() {
  const now = el("div");
  const timeline = el("div");
  const seconds = el("select", { onchange: () => load() }, [10, 30, 120, 600].map((value) =>
    el("option", { value, selected: value === 30 }, `${value} s`)));
  const grid = new ChartGrid(CHARTS);

  async function load() {
    try {
      const found = await getJson("/api/lanes", { seconds: seconds.value });
      fill(timeline, lanes(found), pushes(found));
    } catch (error) {
      fill(timeline, el("p", { class: "bad" }, error.message));
    }
  }

  load();
  return {
    element: el("div", {}, now, el("h2", {}, "What each process did in the last ", seconds, " (r loads it again)"), timeline, grid.element),
    names: grid.names,
    update(store) {
      grid.update(store);
      for (const chart of grid.charts) chart.element.hidden = !chart.plot;
      fill(now, workers(store.state), notes(store.state));
    },
    keys: { r: ["load the timeline again", load] },
    close() { grid.destroy(); },
  };
}

function workers(state) {
  const title = el("h2", {}, "Workers");
  if (!state.live) return [title, el("p", { class: "dim" }, state.live_problem), processes(state)];
  const live = state.live;
  const known = COUNTERS.filter(([, name]) => live.workers.some((each) => name in each.counters));
  const rows = live.workers.map((each) => [each.id,
    el("span", { class: each.is_listed ? "good" : "bad" }, each.is_listed ? "listed" : "gone"), each.host, each.device,
    each.version < 0 ? "–" : String(each.version), number(each.version < 0 ? null : Math.max(0, live.live_version - each.version)),
    each.catches_up, ago(each.seen_s), number(each.tok_s), ...known.map(([, name]) => number(each.counters[name] ?? null)),
    share(each.counters.kv_blocks ? each.counters.kv_blocks_used / each.counters.kv_blocks : null)]);
  return [title, el("p", {}, `Version ${live.live_version} is live; the learner is ${live.learner || "not there"}.`),
    rows.length
      ? table([["worker", ""], ["state", ""], ["host", ""], ["device", ""], ["version", "number"], ["behind by", "number"],
        ["catches up from", ""], ["posted, ago", "number"], ["tokens/s", "number"], ...known.map(([label]) => [label, "number"]),
        ["KV cache", "number"]], rows)
      : el("p", { class: "bad" }, "No worker is listed: it has not announced itself, or it is gone."),
    processes(state)];
}

function processes(state) {
  const gone = state.processes.filter((each) => !each.is_alive).map((each) => each.name);
  return gone.length ? el("p", { class: "bad" }, `Gone: ${gone.join(", ")}.`) : null;
}

function notes(state) {
  const found = state.live ? state.live.notes : [];
  if (!found.length) return null;
  return [el("h2", {}, "What workers report"), table([["worker", ""], ["environment", ""], ["report", "text"], ["times", "number"]],
    [...found].reverse().map((note) => [note.worker, note.environment, note.text, number(note.times)]))];
}
