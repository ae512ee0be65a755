// The frame of all pages: navigation by #/page/rest, updates every two seconds, theme, keys.

import { ago, el, fill } from "./dom.js";
import { RunStore } from "./api.js";

/**
 * Pages in the order of the keys 1 ... 9. Each is a module of pages/ with `open(context)`, which returns
 * {element, names: metrics to keep up to date, update(store), close(), keys: {key: [help, handler]}}; all but the first optional.
 * `context`: {rest: words after the page's name in the address, query: URLSearchParams, go(hash)}.
 */
const PAGES = ["overview", "staleness", "learner", "fleet", "rollouts", "compare", "config"];
const GRAVE = ["failed", "lost"];
const UPDATE_MS = 2000;

let page = {};
let store = new RunStore([]);
let isPaused = false;
let opened = 0;
let asked = -1; // the page for which an answer is awaited

const KEYS = {
  t: ["light or dark", switchTheme],
  p: ["pause updates, and go on", () => { isPaused = !isPaused; showAlive(); }],
  "?": ["these keys", () => showKeys()],
};

async function route() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("?")[0].split("/").map(decodeURIComponent);
  const chosen = PAGES.includes(name) ? name : PAGES[0];
  const own = (opened += 1);
  page.close?.();
  page = {};
  for (const link of document.querySelectorAll("#pages a")) {
    if (link.dataset.page === chosen) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const module = await import(`./pages/${chosen}.js`);
  if (own !== opened) return; // another page was chosen meanwhile
  const query = new URLSearchParams(location.hash.split("?")[1] || "");
  page = module.open({ rest, query, go: (hash) => { location.hash = hash; } });
  store = new RunStore(page.names || []);
  fill(document.getElementById("page"), page.element);
  await update();
}

async function update() {
  const own = opened;
  if (asked === own) return;
  asked = own;
  try {
    await store.poll();
    if (own !== opened) return;
    document.getElementById("run").textContent = store.state.run;
    document.title = `${store.state.run} · async_rl`;
    page.update?.(store);
    showAlive();
  } catch (error) {
    showAlive(`no answer from async-rl view: ${error.message}`);
  } finally {
    if (asked === own) asked = -1;
  }
}

function showAlive(problem = "") {
  const { is_running: isRunning, kind, step, steps, last_row: lastRow, now } = store.state;
  const where = step === null || step === undefined ? "no step yet" : `step ${step}${steps ? ` of ${steps}` : ""}`;
  const said = problem || `${isRunning ? "●" : "■"} ${kind} · ${where}${lastRow ? ` · ${ago(now - lastRow)} ago` : ""}`;
  const shown = document.getElementById("alive");
  shown.textContent = isPaused ? `paused · ${said}` : said;
  shown.className = problem ? "bad" : isRunning ? "good" : GRAVE.includes(kind) ? "bad" : "dim";
}

function switchTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
  redraw();
}

/** Draw again what is known; before the first answer there is nothing to draw. */
function redraw() {
  if (store.state.run !== undefined) page.update?.(store);
}

function showKeys() {
  const dialog = document.getElementById("keys");
  if (dialog.open) return dialog.close();
  const rows = [...PAGES.map((name, index) => [String(index + 1), name]),
    ...Object.entries({ ...KEYS, ...page.keys }).map(([key, [help]]) => [key, help])];
  fill(dialog, el("h2", {}, "Keys"), el("table", {}, rows.map(([key, help]) =>
    el("tr", {}, el("td", {}, el("kbd", {}, key)), el("td", {}, help)))));
  return dialog.showModal();
}

function pressed(event) {
  if (event.ctrlKey || event.altKey || event.metaKey || event.target.closest("input, select, textarea")) return;
  const action = page.keys?.[event.key] || KEYS[event.key];
  const chosen = PAGES[Number(event.key) - 1];
  if (action) action[1](event);
  else if (chosen) location.hash = `#/${chosen}`;
  else return;
  event.preventDefault();
}

function start() {
  const theme = localStorage.getItem("theme");
  if (theme) document.documentElement.dataset.theme = theme;
  history.replaceState(null, "", location.pathname + location.hash); // the cookie has the token now
  const capital = (name) => name[0].toUpperCase() + name.slice(1);
  fill(document.getElementById("pages"), PAGES.map((name) => el("a", { href: `#/${name}`, "data-page": name }, capital(name))));
  document.getElementById("theme").addEventListener("click", switchTheme);
  document.getElementById("help").addEventListener("click", showKeys);
  addEventListener("keydown", pressed);
  addEventListener("hashchange", route);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  route().finally(keepUpToDate);
}

/** Ask again some time after each answer, so that a slow server is not asked more than it answers. */
async function keepUpToDate() {
  if (!isPaused && !document.hidden) await update();
  setTimeout(keepUpToDate, UPDATE_MS);
}

start();
