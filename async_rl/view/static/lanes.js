// Lanes: two tracks per process and a bar for everything that took time, over a window of the run.

import { clock, el, number, table } from "./dom.js";
import { seconds as took } from "./rollouts/text.js";

/** Kind -> [words, colour]. The upper track has what interrupts a process, so that the many bars of its work do not hide it. */
const UPPER = { blocked: ["blocked code", "c3"], swap: ["loading a new version", "c7"], push: ["push of weights", "c4"],
  checkpoint: ["checkpoint", "c5"], process: ["process started or lost", "c6"] };
const LOWER = { group: ["group rolled out", "c0"], step: ["training", "c2"], take: ["waiting for groups", "c1"] };
/** What a worker's episodes did, where one worker is shown. */
const EPISODES = { engine: ["engine at work", "c0"], task: ["task drawn", "c6"], queue: ["waiting for the engine", "c1"],
  inference: ["generation", "c2"], environment: ["environment and tools", "c4"], reward: ["grading", "c5"] };
const LEAST_DRAG = 6; // pixels: less is a click
const WIDTH_OF_TICK = 90; // pixels
const OTHERS = " other workers"; // they share a lane

/**
 * The lanes of an answer of /api/lanes. `onRange(since, until)` is called with the seconds since 1970 that were dragged over,
 * `onWorker(name)` when a worker's name is chosen; without it the lanes are those of one worker.
 */
export function lanes(found, width, onRange, onWorker = null) {
  if (!found.lanes.length) return el("p", { class: "dim" }, "No event is recorded in this window (recording.events_mb).");
  const times = ticks(found, Math.max(2, Math.floor(width / WIDTH_OF_TICK)));
  const chosen = el("div", { class: "chosen-range", hidden: true });
  const over = el("div", { class: "over" }, times.map(([at]) => placed(el("b"), at, 0)), chosen);
  const timeline = el("div", { class: "timeline" },
    el("div", { class: "lane axis" }, el("span", {}, "since recording began"), el("div", {}, times.map(([at, words]) => placed(el("small", {}, words), at)))),
    found.lanes.map((lane) => row(lane, found.seconds, onWorker)), over);
  dragging(timeline, over, chosen, (from, to) => onRange(found.begin + from * found.seconds, found.begin + to * found.seconds));
  return el("div", {}, legend("upper half", UPPER), legend("lower half", LOWER), onWorker ? null : legend("its episodes", EPISODES), timeline,
    found.left_out ? el("div", { class: "banner" }, `The ${number(found.left_out)} shortest events of this window are left out: zoom in to see them.`) : null);
}

function legend(where, kinds) {
  return el("div", { class: "keyed" }, el("span", { class: "dim" }, `${where}:`), Object.entries(kinds).map(([, [words, colour]]) => {
    const swatch = el("span", { class: "swatch" });
    swatch.style.background = `var(--${colour})`;
    return el("span", {}, swatch, words);
  }));
}

function row(lane, seconds, onWorker) {
  const bars = lane.bars.map(([kind, begin, lasted, text]) => {
    const [words, colour] = UPPER[kind] || LOWER[kind] || EPISODES[kind];
    const bar = el("i", { class: `${kind} ${kind in UPPER ? "upper" : "lower"}`, title: `${words}: ${text} · ${took(lasted)}` });
    const left = Math.max(0, begin);
    placed(bar, left / seconds);
    bar.style.width = `max(2px, ${(100 * Math.max(0, Math.min(seconds, begin + lasted) - left)) / seconds}%)`;
    bar.style.background = `var(--${colour})`;
    return bar;
  });
  const canOpen = onWorker && lane.bars.some(([kind]) => kind === "group") && !lane.name.endsWith(OTHERS);
  const name = canOpen ? el("button", { type: "button", class: "link", onclick: () => onWorker(lane.name) }, lane.name) : lane.name;
  return el("div", { class: "lane" }, el("span", { title: lane.name }, name), el("div", {}, bars));
}

function placed(element, share) {
  element.style.left = `${100 * share}%`;
  return element;
}

/** Round times within the window: [share of the window, words]. */
export function ticks({ begin, seconds, recorded_from: recordedFrom }, most) {
  const sizes = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400];
  const size = sizes.find((each) => seconds / each <= most) || Math.ceil(seconds / most / 86400) * 86400;
  const from = begin - recordedFrom;
  const found = [];
  for (let at = Math.ceil(from / size - 1e-9); at * size < from + 0.97 * seconds; at += 1) {
    found.push([(at * size - from) / seconds, clock(at * size, size)]);
  }
  return found;
}

function dragging(timeline, over, chosen, onRange) {
  let from = null;
  const share = (event) => {
    const { left, width } = over.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - left) / width));
  };
  const show = (to) => {
    placed(chosen, Math.min(from, to));
    chosen.style.width = `${100 * Math.abs(to - from)}%`;
    chosen.hidden = false;
  };
  timeline.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.clientX < over.getBoundingClientRect().left) return;
    from = share(event);
    timeline.setPointerCapture(event.pointerId);
  });
  timeline.addEventListener("pointermove", (event) => { if (from !== null) show(share(event)); });
  timeline.addEventListener("pointercancel", () => { from = null; chosen.hidden = true; });
  timeline.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const began = from, to = share(event);
    from = null;
    chosen.hidden = true;
    if (Math.abs(to - began) * over.clientWidth >= LEAST_DRAG) onRange(Math.min(began, to), Math.max(began, to));
  });
}

/** The last pushes of the window, the newest first. */
export function pushes(found) {
  if (!found.pushes.length) return null;
  const all = found.num_pushes, some = found.pushes.length;
  const columns = [["version", "number"], ["began", "number"], ["waited before", "number"], ["took", "number"],
    ["bytes each", "number"], ["got it", ""], ["how", ""], ["did not", "text"]];
  return [el("h2", {}, `Pushes in this window${all > some ? `: the last ${some} of ${number(all)}` : ""}`),
    table(columns, [...found.pushes].reverse().map((push) => [
      number(push.version), clock(push.at - found.recorded_from, 0.1), took(push.wait_s), took(push.seconds), number(push.bytes),
      (push.staged || []).join(", "), [...new Set(Object.values(push.how || {}))].join("; "), Object.entries(push.dropped || {}).map(([worker, why]) => `${worker}: ${why}`).join("; ")])),
    el("p", { class: "dim" }, "A push is complete when every worker in \"got it\" holds the version. \"Waited before\" is the time from "
      + "packing until the push began, because the push before was still under way. Loading it is in the workers' lanes.")];
}
