// Charts over steps: uPlot with the colours of the theme, a legend, and one cursor for all charts of a page.

import uPlot from "./vendor/uPlot.esm.js";
import { color, el, fill, number, themeColor, visible } from "./dom.js";

/** Labels of the times of a push, on every page the same. */
export const PUSH = { "weights/push_s": "push: from its begin until all workers have it", "weights/wait_s": "before it: packed, waiting for the push before" };

const HEIGHT = 190;
const cursor = { sync: { key: "steps" }, focus: { prox: 24 } };

/** Whether a metric's name matches a pattern with `*`. */
export function matches(pattern, name) {
  const bare = pattern.replace(/^mean:/, "");
  if (!bare.includes("*")) return bare === name;
  return new RegExp(`^${bare.split("*").map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&")).join(".*")}$`).test(name);
}

/**
 * A chart that draws what `update` gives it.
 *
 * `spec`: {title, names: patterns, labels: {name: label}, stacked, log, range: [low, high], bound: number, unit}
 */
export class Chart {
  constructor(spec) {
    this.spec = spec;
    this.body = el("div", {}, el("div", { class: "empty" }, "no values yet"));
    this.element = el("section", { class: "chart" },
      el("h3", {}, spec.title, " ", el("small", {}, spec.unit || "")), this.body);
    this.note = null;
    this.plot = null;
    this.drawn = "";
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.element);
  }

  /** Draw the columns of a RunStore that match the patterns. */
  update(store) {
    const names = Object.keys(store.values).filter((name) => this.spec.names.some((pattern) => matches(pattern, name)));
    const order = (name) => this.spec.names.findIndex((pattern) => matches(pattern, name));
    names.sort((left, right) => order(left) - order(right) || left.localeCompare(right, "en", { numeric: true }));
    const lines = names.map((name) => ({ name, label: this.label(name), values: store.values[name] }));
    this.element.title = names.map((name) => (store.about[name] ? `${name}: ${store.about[name].help}` : name)).join("\n");
    this.draw(store.steps, lines);
  }

  /** A sentence below the chart; none if it is empty. */
  remark(text) {
    if (this.note?.textContent === text || (!this.note && !text)) return;
    this.note?.remove();
    this.note = text ? el("p", { class: "remark" }, text) : null;
    if (this.note) this.element.append(this.note);
  }

  /** Draw lines {label, values, isDim} over x. */
  draw(steps, lines) {
    if (!lines.length || !steps.length) return;
    const bound = this.spec.bound;
    const columns = this.spec.stacked ? stack(lines.map((line) => line.values)) : lines.map((line) => line.values);
    if (bound !== undefined && bound !== null) columns.push(steps.map(() => bound));
    const shape = JSON.stringify([lines.map((line) => line.label), bound, document.documentElement.dataset.theme, themeColor("text")]);
    if (shape !== this.drawn) {
      this.drawn = shape;
      this.plot?.destroy();
      this.plot = new uPlot(this.options(lines, bound), [steps, ...columns], fill(this.body));
    } else {
      this.plot.setData([steps, ...columns], this.isWhole(steps));
    }
  }

  /** Whether the shown range is all of it, so that new steps may move it; a range chosen by dragging stays. */
  isWhole() {
    const { min, max } = this.plot.scales.x;
    const known = this.plot.data[0];
    return min === null || (min <= known[0] && max >= known[known.length - 1]);
  }

  label(name) {
    const given = this.spec.labels?.[name];
    if (given) return given;
    const pattern = this.spec.names.find((each) => matches(each, name)).replace(/^mean:/, "");
    const [before, after] = pattern.includes("*") ? pattern.split("*") : [name.slice(0, name.lastIndexOf("/") + 1), ""];
    const words = name.slice(before.length, name.length - after.length).replaceAll("_", " ");
    return visible(words.replace(/^(\d+) (\d+)$/, "$1 to $2").replace(/^(\d+) up$/, "$1 and more")); // buckets of ages
  }

  options(lines, bound) {
    const axis = { stroke: themeColor("dim"), grid: { stroke: themeColor("line"), width: 1 }, ticks: { show: false } };
    const value = (_plot, given) => number(given);
    const series = lines.map((line, index) => ({
      label: line.label,
      stroke: line.isDim ? themeColor("dim") : color(index),
      width: line.isDim ? 0.7 : 1.5,
      spanGaps: true,
      fill: this.spec.stacked ? `${color(index)}66` : undefined,
      points: line.isDim ? { show: false } : undefined,
      value: this.spec.stacked ? (_plot, _given, at, place) => number(place === null ? null : lines[at - 1].values[place]) : value,
    }));
    if (bound !== undefined && bound !== null) {
      series.push({ label: "bound", stroke: themeColor("dim"), dash: [6, 4], width: 1, points: { show: false }, value });
    }
    const y = this.spec.log ? { distr: 3 } : this.spec.range ? { range: (_plot, low, high) => [
      Math.min(this.spec.range[0], low ?? this.spec.range[0]), Math.max(this.spec.range[1], high ?? this.spec.range[1])] } : {};
    return {
      width: this.width(), height: HEIGHT, cursor, series: [{ label: this.spec.x || "step" }, ...series],
      scales: { x: { time: false }, y },
      axes: [{ ...axis, size: 30 }, { ...axis, size: 56, values: (_plot, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))) }],
      bands: this.spec.stacked ? lines.slice(1).map((_line, index) => ({ series: [index + 2, index + 1] })) : undefined,
    };
  }

  width() {
    return Math.max(240, this.element.clientWidth - 18);
  }

  resize() {
    if (this.plot && this.plot.width !== this.width()) this.plot.setSize({ width: this.width(), height: HEIGHT });
  }

  destroy() {
    this.observer.disconnect();
    this.plot?.destroy();
  }
}

function stack(columns) {
  const sums = new Array(columns[0]?.length || 0).fill(0);
  return columns.map((column) => column.map((value, index) => (sums[index] += value || 0)));
}

/** A grid of charts, and the names that they need. */
export class ChartGrid {
  constructor(specs) {
    this.charts = specs.map((spec) => new Chart(spec));
    this.element = el("div", { class: "charts" }, this.charts.map((chart) => chart.element));
    this.names = [...new Set(specs.flatMap((spec) => spec.names))];
  }

  update(store) {
    for (const chart of this.charts) chart.update(store);
  }

  destroy() {
    for (const chart of this.charts) chart.destroy();
  }
}
