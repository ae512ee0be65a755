// Workers: what each serves and does, pushes of weights, and what went wrong.

import { getJson } from "../api.js";
import { ChartGrid, PUSH } from "../charts.js";
import { ago, el, fill, hasEnded, number, share, table } from "../dom.js";
import { lanes, pushes } from "../lanes.js";

const CHARTS = [
  { title: "Workers", names: ["rollout/workers", "weights/workers", "weights/dropped"],
    labels: { "rollout/workers": "present", "weights/workers": "got the last push", "weights/dropped": "left out of it" } },
  { title: "Sampled tokens", unit: "tokens/s, all workers", names: ["rollout/tok_s"], labels: { "rollout/tok_s": "sampled, last 10 s" } },
  { title: "Generations", names: ["engine/running", "engine/waiting"] },
  { title: "KV cache in use", unit: "share", range: [0, 1], names: ["engine/kv_used"], labels: { "engine/kv_used": "in use" } },
  { title: "Groups being rolled out", unit: "groups", names: ["rollout/inflight"], labels: { "rollout/inflight": "in flight" } },
  { title: "Push of a version", unit: "s", names: ["weights/push_s", "weights/wait_s"], labels: PUSH },
  { title: "Size of a push", unit: "bytes per worker", names: ["weights/bytes"] },
  { title: "Failed episodes by boundary, since the workers started", names: ["rollout/failures/*"] },
  { title: "Reward by environment", names: ["environment/*/reward"] },
  { title: "Groups of the step by environment", unit: "share", stacked: true, range: [0, 1], names: ["mean:environment/*/share"] },
];
const COUNTERS = [["groups", "inflight"], ["generations", "engine/running"], ["waiting", "engine/waiting"], ["episodes", "episodes"]];

const WINDOWS = [[10, "last 10 s"], [30, "last 30 s"], [120, "last 2 min"], [600, "last 10 min"], [0, "whole run"]];

export function open() {
  const now = el("div");
  const timeline = el("div");
  const chosen = el("select", { "aria-label": "window of the timeline", onchange: () => show([]) }, WINDOWS.map(([value, words]) =>
    el("option", { value, selected: value === 30 }, words)));
  const back = el("button", { type: "button", onclick: zoomOut, hidden: true }, "zoom out (z)");
  const grid = new ChartGrid(CHARTS);
  const everyone = el("button", { type: "button", onclick: () => showWorker(""), hidden: true }, "all processes (a)");
  let ranges = []; // dragged over, each within the one before
  let worker = ""; // whose episodes are shown
  let asked = 0;

  async function load() {
    const own = (asked += 1);
    const [since, until] = ranges.at(-1) || [];
    const range = since === undefined ? { seconds: chosen.value }
      : { since: Math.floor(1000 * since), until: Math.ceil(1000 * until) };
    const query = worker ? { ...range, worker } : range;
    try {
      const found = await getJson("/api/lanes", query);
      if (own !== asked) return; // another window was chosen meanwhile
      fill(timeline, lanes(found, timeline.clientWidth * 0.8, (from, to) => show([...ranges, [from, to]]), worker ? null : showWorker),
        worker ? null : pushes(found));
    } catch (error) {
      fill(timeline, el("p", { class: "bad" }, error.message));
    }
  }

  function show(wanted) {
    ranges = wanted;
    back.hidden = !ranges.length;
    return load();
  }

  function zoomOut() {
    return show(ranges.slice(0, -1));
  }

  function showWorker(name) {
    worker = name;
    everyone.hidden = !worker;
    return load();
  }

  function showAll() {
    chosen.value = "0";
    return show([]);
  }

  load();
  return {
    element: el("div", {}, now, el("h2", {}, "What each process did: ", chosen, " ", back, " ", everyone),
      el("p", { class: "dim" }, "Drag over the lanes to zoom in; a worker's name shows its episodes; w shows the whole run, r loads again."), timeline, grid.element),
    names: grid.names,
    update(store) {
      grid.update(store);
      for (const chart of grid.charts) chart.element.hidden = !chart.plot;
      fill(now, workers(store.state), notes(store.state));
    },
    keys: { a: ["all processes in the timeline", () => showWorker("")], r: ["load the timeline again", load], w: ["the whole run in the timeline", showAll], z: ["zoom out of the timeline", zoomOut] },
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
  return gone.length && !hasEnded(state) ? el("p", { class: "bad" }, `Gone: ${gone.join(", ")}.`) : null;
}

function notes(state) {
  const found = state.live ? state.live.notes : [];
  if (!found.length) return null;
  return [el("h2", {}, "What workers report"), table([["worker", ""], ["environment", ""], ["report", "text"], ["times", "number"]],
    [...found].reverse().map((note) => [note.worker, note.environment, note.text, number(note.times)]))];
}
