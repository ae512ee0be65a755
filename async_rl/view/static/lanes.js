// Lanes: a row per process, a bar for everything that took time, over a window that ends with the run's last moment.

import { el, number, table } from "./dom.js";

const COLOURS = { group: "c0", step: "c2", take: "c1", push: "c4", checkpoint: "c5", swap: "c7", blocked: "c3", process: "c6" };
const WORDS = { group: "group rolled out", step: "training", take: "waiting for groups", push: "push", checkpoint: "checkpoint",
  swap: "new version", blocked: "blocked", process: "process started or lost" };

/** The lanes of an answer of /api/lanes. */
export function lanes(found) {
  if (!found.lanes.length) return el("p", { class: "dim" }, "No event is recorded in this window (recording.events_mb).");
  return el("div", {},
    el("div", { class: "keyed" }, Object.entries(WORDS).map(([kind, words]) => el("span", {}, swatch(kind), words))),
    found.lanes.map((lane) => row(lane, found.seconds)),
    found.left_out ? el("div", { class: "banner" }, `${number(found.left_out)} earlier events of this window are left out.`) : null);
}

function row(lane, seconds) {
  const bars = lane.bars.map(([kind, begin, took, text]) => {
    const bar = el("i", { title: `${text} · ${number(took)} s` });
    const left = Math.max(0, begin);
    bar.style.left = `${(100 * left) / seconds}%`;
    bar.style.width = `max(2px, ${(100 * Math.max(0, Math.min(seconds, begin + took) - left)) / seconds}%)`;
    bar.style.background = `var(--${COLOURS[kind]})`;
    return bar;
  });
  return el("div", { class: "lane" }, el("span", { title: lane.name }, lane.name), el("div", {}, bars));
}

function swatch(kind) {
  const made = el("span", { class: "swatch" });
  made.style.background = `var(--${COLOURS[kind]})`;
  return made;
}

/** The last pushes of the window, the newest first. */
export function pushes(found) {
  if (!found.pushes.length) return null;
  const columns = [["version", "number"], ["at", "number"], ["took", "number"], ["bytes each", "number"], ["got it", ""], ["did not", "text"]];
  return [el("h2", {}, "Pushes in this window"), table(columns, [...found.pushes].reverse().map((push) => [
    number(push.version), `${number(push.at - found.begin)} s`, `${number(push.seconds)} s`, number(push.bytes),
    (push.staged || []).join(", "), Object.entries(push.dropped || {}).map(([worker, why]) => `${worker}: ${why}`).join("; ")]))];
}
