// Fetches JSON, and keeps the columns of one page up to date.

export async function getJson(path, query = {}) {
  const words = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null && value !== undefined));
  const answer = await fetch(`${path}?${words}`);
  if (!answer.ok) throw new Error((await answer.text()) || `${answer.status}`);
  return answer.json();
}

/** The state of the run and the columns of `names`, of which later requests bring only what changed. */
export class RunStore {
  constructor(names) {
    this.names = names;
    this.state = {};
    this.steps = [];
    this.times = [];
    this.values = {};
    this.about = {};
    this.evaluations = [];
    this.position = { since: 0, server: "" };
  }

  async poll() {
    const state = await getJson("/api/run", { names: this.names.join(","), ...this.position });
    this.state = state;
    this.merge(state.series);
  }

  /** Replace the steps from `series.from` on. After that, columns hold at most what was sent plus what was added since. */
  merge(series) {
    this.position = { since: series.rows, server: series.server };
    if (series.from === null) return;
    let kept = this.steps.length;
    while (kept > 0 && this.steps[kept - 1] >= series.from) kept -= 1;
    const begins = kept === 0;
    if (begins) this.values = {};
    this.about = { ...this.about, ...series.about };
    this.steps = this.steps.slice(0, kept).concat(series.steps);
    this.times = this.times.slice(0, kept).concat(series.times);
    for (const name of new Set([...Object.keys(this.values), ...Object.keys(series.values)])) {
      const before = (this.values[name] || new Array(kept).fill(null)).slice(0, kept);
      this.values[name] = before.concat(series.values[name] || new Array(series.steps.length).fill(null));
    }
    const newer = new Set(series.evaluations.map((each) => each.step));
    const older = begins || series.evaluations_begin_anew ? [] : this.evaluations.filter((each) => !newer.has(each.step));
    this.evaluations = older.concat(series.evaluations).sort((left, right) => left.step - right.step);
    if (this.steps.length > MOST_POINTS) this.position = { since: 0, server: "" };
  }

  /** The newest value of a metric that not every step has. */
  last(name) {
    const column = this.values[name] || [];
    for (let index = column.length - 1; index >= 0; index -= 1) if (column[index] !== null) return column[index];
    return null;
  }
}

const MOST_POINTS = 3000; // then the columns are fetched anew, reduced by the server
