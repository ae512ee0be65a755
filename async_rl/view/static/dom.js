// Builds elements. All text goes through textContent, so that what models and tools wrote stays text.

/** An element with attributes (`class`, `href`, `on...` handlers) and children: elements, texts, or null. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, String(value));
  }
  return fill(made, ...children);
}

/** Replace the children of an element. */
export function fill(parent, ...children) {
  parent.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined)
    .map((child) => (child instanceof Node ? child : document.createTextNode(visible(String(child))))));
  return parent;
}

// Control characters, those that change the direction of text, and those without width are shown as pictures.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

export function visible(text) {
  return text.replace(HIDDEN, (found) => (found < " " ? String.fromCharCode(0x2400 + found.charCodeAt(0)) : "\ufffd"));
}

/** A table; `columns` are [heading, "number" | "text" | ""], `rows` lists of cells. */
export function table(columns, rows) {
  const cell = (tag, kind, content) => el(tag, { class: kind || null }, content);
  return el("div", { class: "table" }, el("table", {},
    el("thead", {}, el("tr", {}, columns.map(([heading, kind]) => cell("th", kind, heading)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((content, index) => cell("td", columns[index][1], content)))))));
}

export function tile(label, value, href = null, note = "") {
  return el(href ? "a" : "div", { class: "tile", href }, el("span", {}, label), el("b", {}, value), note ? el("small", {}, note) : null);
}

/** A number as short as it can be read; "–" for none. */
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(2)} G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(2)} M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  if (Number.isInteger(value)) return String(value);
  return size !== 0 && size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
}

export function share(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`;
}

export function ago(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const steps = [[86400, "d"], [3600, "h"], [60, "min"]];
  for (const [size, unit] of steps) if (seconds >= 2 * size) return `${Math.round(seconds / size)} ${unit}`;
  return `${Math.max(0, Math.round(seconds))} s`;
}

/** A time of the run: "35 s", or "2:05", "1:02:05"; `size`: the distance of two of them. */
export function clock(seconds, size = 1) {
  const digits = size < 1 ? Math.ceil(-Math.log10(size)) : 0;
  if (Math.abs(seconds) < 120) return `${Number(seconds.toFixed(digits))} s`;
  const whole = Math.floor(seconds), two = (value) => String(value).padStart(2, "0");
  const hours = Math.floor(whole / 3600), rest = digits ? (seconds - whole).toFixed(digits).slice(1) : "";
  const minutes = Math.floor(whole / 60) % 60;
  return `${hours ? `${hours}:${two(minutes)}` : minutes}:${two(whole % 60)}${rest}`;
}

/** Whether a run ended as it should: then it is no news that its processes are gone. */
export function hasEnded(state) {
  return ["finished", "stopped"].includes(state.kind);
}

/** The colour of the nth series in the current theme. */
export function color(index) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--c${index % 8}`).trim();
}

export function themeColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** A bar of shares that add up to 1, with a legend; `parts` are [label, share]. */
export function shareBar(parts) {
  const bar = el("div", { class: "bar" });
  const legend = el("div", { class: "keyed" });
  parts.forEach(([label, part], index) => {
    const piece = el("div", { title: `${label}: ${share(part)}` });
    piece.style.width = `${100 * part}%`;
    piece.style.background = color(index);
    const swatch = el("span", { class: "swatch" });
    swatch.style.background = color(index);
    bar.append(piece);
    legend.append(el("span", {}, swatch, `${label} ${share(part)}`));
  });
  return el("div", {}, bar, legend);
}
