// Shows the daemon's frame: asks for it while somebody looks, and writes it into the page as text, never as HTML.
//
// Fields are those of docs/frame.md. A request asks only for the steps of the history that the page does not have.

"use strict";
(() => {

const PERIOD_MS = 2000;
const LEAST_MS = 1000;
const DEADLINE_MS = 5000;
// Keys from which on the estimates mean something, as `forebay advise` has it.
const LEAST_KEYS = 10000;
const NONE = "–";

// A proxy may serve the page below any path, with a slash behind it or without.
const base = location.pathname.endsWith("/") ? location.pathname : location.pathname + "/";
const $ = (id) => document.getElementById(id);

// ---------------------------------------------------------------- words

const number = (value, digits = 0) =>
  value.toLocaleString("en-GB", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const known = (value) => value !== null && value !== undefined;
const short = (value) => number(value, value >= 99.95 || value === 0 ? 0 : value >= 9.995 ? 1 : 2);

function scaled(value, step, units) {
  let at = 0;
  while (Math.abs(value) >= step * 0.9995 && at < units.length - 1) {
    value /= step;
    at += 1;
  }
  return `${at === 0 ? number(value) : short(value)}\u00a0${units[at]}`;
}

const size = (bytes) => known(bytes) ? scaled(bytes, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]) : NONE;
const speed = (bytes) => known(bytes) ? scaled(bytes, 1000, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]) : NONE;
const percent = (ratio) => known(ratio) ? `${number(100 * ratio, 1)}\u00a0%` : NONE;
const rate = (value, unit = "") => known(value) ? `${number(value, value > 0 && value < 9.95 ? 1 : 0)}${unit && "\u00a0" + unit}/s` : NONE;

function time(seconds) {
  if (!known(seconds)) return NONE;
  if (seconds < 0.001) return `${short(seconds * 1e6)}\u00a0µs`;
  return seconds < 1 ? `${short(seconds * 1e3)}\u00a0ms` : `${short(seconds)}\u00a0s`;
}

function span(seconds) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  let at = parts.findIndex(([unit]) => seconds >= unit);
  if (at < 0) return `${number(seconds, 1)}\u00a0s`;
  const [unit, name] = parts[at];
  const first = `${number(Math.floor(seconds / unit))}\u00a0${name}`;
  const rest = parts[at + 1] && Math.floor((seconds % unit) / parts[at + 1][0]);
  return rest ? `${first} ${rest}\u00a0${parts[at + 1][1]}` : first;
}

const clock = (ms, withSeconds = true) =>
  new Date(ms).toLocaleTimeString("en-GB", withSeconds ? {} : { hour: "2-digit", minute: "2-digit" });
// Up to ten million to the last digit; what a host counts in weeks, to three.
const amount = (value) => value < 1e7 ? number(value) : scaled(value, 1000, ["", "k", "M", "G", "T"]);
const count = (value, one, many) => `${amount(value)}\u00a0${value === 1 ? one : many}`;

const REASONS = {
  never_seen: ["Never seen", "was never stored, or too long ago to be remembered"],
  evicted: ["Evicted", "was evicted from the pool to make room"],
  refused: ["Not kept", "the block before it was absent, or the policy bypassed it"],
  failed: ["Failed", "had a wrong checksum, or its tier failed"],
  too_slow: ["Too slow", "was on a lower tier, and did not come in time"],
  not_yet: ["Not yet", "was still being verified after a restart, or was behind such a key"],
  other_namespace: ["Other namespace", "is stored for another model, layout or tenant"],
  over_limit: ["Over limit", "was there, but leases held the memory that it needed"],
  promotion_unfinished: ["Still loading", "was still on its way from a lower tier"],
};
const TIERS = { pool: "Pool", ssd: "SSD", fs: "Directory", redis: "Redis", object: "Object store" };
const CHECKS = { core: "Core", index: "Index", drain: "Drain" };
const WINDOWS = { "15m": "Last 15 minutes", "1h": "Last hour", "1d": "Last day" };
// Where the page shows more of what an alarm says.
const ALARMS = {
  "hit rate fell": { at: "rate-title", link: "Show the hit rate" },
  "stored but never hit": { at: "miss-title", link: "Show the misses" },
};
const STATES = {
  ready: ["good", "✓ ready", ""],
  attaching: ["warn", "⚠ attaching", "some workers do not map the pool"],
  client: ["", "client", "has no workers"],
  gone: ["warn", "⚠ gone", "its processes still map the pool"],
};

// ---------------------------------------------------------------- elements

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// What stands between backticks is what somebody types.
const typed = (text) => text.split("`").map((part, at) => at % 2 ? element("code", {}, part) : part);

function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function width(node, ratio) {
  const value = `${(100 * Math.min(1, Math.max(0, ratio || 0))).toFixed(2)}%`;
  if (node.style.width !== value) node.style.width = value;
}

// A cell is text, or {text, mark, long, bar, key}: a coloured word, a second line, a bar, a colour of the legend.
function cell(made, content) {
  const { text, mark, long, bar, key } = typeof content === "object" ? content : { text: content };
  const shape = [mark, known(long), known(bar), key].join();
  if (made.dataset.shape !== shape) {
    made.dataset.shape = shape;
    made.replaceChildren(element("span", mark ? { class: mark } : {}));
    if (key) made.prepend(element("i", { class: `key ${key}`, "aria-hidden": "true" }));
    if (known(long)) made.append(element("span", { class: "long" }));
    if (known(bar)) made.append(element("span", { class: "bar", "aria-hidden": "true" }, element("i")));
  }
  say(made.querySelector("span"), text);
  if (known(long)) say(made.querySelector(".long"), long);
  if (known(bar)) width(made.querySelector(".bar > i"), bar);
  made.classList.toggle("missing", text === NONE);
}

// Columns are [name, kind]; the first is each row's heading. Rows are changed in place, so that a selection stays.
function table(id, columns, rows, nothing, anchor) {
  const whole = $(id);
  if (!whole.tBodies.length) {
    const heads = columns.map(([name, kind]) => element("th", { scope: "col", role: "columnheader", class: kind }, name));
    whole.setAttribute("role", "table");
    whole.append(
      element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...heads)),
      element("tbody", { role: "rowgroup" }));
  }
  const body = whole.tBodies[0];
  whole.tHead.hidden = rows.length === 0;
  if (rows.length === 0) {
    if (body.dataset.kind !== "empty") {
      body.dataset.kind = "empty";
      body.replaceChildren(element("tr", { role: "row" },
        element("td", { class: "empty", colspan: columns.length, role: "cell" }, nothing)));
    }
    return;
  }
  if (body.dataset.kind !== "rows") {
    body.dataset.kind = "rows";
    body.replaceChildren();
  }
  while (body.rows.length > rows.length) body.lastElementChild.remove();
  while (body.rows.length < rows.length) {
    const cells = columns.map(([name, kind], at) => at === 0
      ? element("th", { scope: "row", role: "rowheader" })
      : element("td", { role: "cell", class: kind, "data-name": name }));
    body.append(element("tr", { role: "row" }, ...cells));
  }
  rows.forEach((row, at) => {
    if (anchor) body.rows[at].id = anchor(at);
    row.forEach((content, column) => cell(body.rows[at].cells[column], content));
  });
}

// ---------------------------------------------------------------- history

const MOST = { hour: 720, day: 288 };
let history = { hour: null, day: null };
let shown = "hour";

// Parallel lists, also in the lists of reasons and tiers.
function joined(old, more, most) {
  if (Array.isArray(more)) {
    if (more.length && typeof more[0] === "object" && more[0] !== null)
      return more.map((part, at) => joined(old && old[at], part, most));
    return (old || []).concat(more).slice(-most);
  }
  if (more === null || typeof more !== "object") return more;
  return Object.fromEntries(Object.entries(more).map(([name, value]) => [name, joined(old && old[name], value, most)]));
}

// ---------------------------------------------------------------- charts over time

const dark = matchMedia("(prefers-color-scheme: dark)");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// A line: its name, its colour, its values out of the history, and whether it is dashed or filled.
const CHARTS = [
  {
    id: "rate-chart", what: "Hit rate", show: percent, top: () => 1,
    lines: [
      { name: "Hit rate", colour: "hit", of: (h) => h.hit_ratio },
      { name: "Ceiling", colour: "ceiling", dash: [2, 3], of: (h) => h.ceiling_ratio },
      { name: "Optimum", colour: "optimum", dash: [7, 4], of: (h) => h.optimum_ratio },
    ],
  },
  {
    id: "fill-chart", what: "Fill of the pool", show: size, top: (frame) => frame.pool.capacity_bytes, base: 1024,
    lines: [
      { name: "Used", colour: "ready", fill: true, of: (h) => h.used_bytes },
      { name: "Held by engines and transfers", colour: "leased", dash: [4, 3], of: (h) => h.held_bytes },
    ],
  },
  {
    id: "flow-chart", what: "Bytes by second", show: speed, top: () => null,
    lines: [
      { name: "Served", colour: "hit", of: (h) => h.hit_bytes_per_second },
      { name: "Stored", colour: "reserved", dash: [7, 4], of: (h) => h.stored_bytes_per_second },
      { name: "Evicted", colour: "optimum", dash: [2, 3], of: (h) => h.evicted_bytes_per_second },
    ],
  },
];

// Steps of an axis of sizes.
const POWERS = Array.from({ length: 60 }, (_, at) => 2 ** at);

function options(chart, space) {
  const font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const axis = { stroke: colour("quiet"), grid: { stroke: colour("grid"), width: 1 }, ticks: { stroke: colour("grid") }, font };
  const whole = (u, splits) => splits.map((value) => chart.show(value).replace(".0\u00a0%", "\u00a0%"));
  return {
    width: space, height: space < 500 ? 190 : 220, padding: [10, 8, 0, 0],
    cursor: { drag: { x: false, y: false }, y: false },
    scales: { y: { range: (u, low, high) => [0, chart.top(last) || (high > 0 ? high * 1.1 : 1)] } },
    axes: [
      { ...axis, values: (u, splits) => splits.map((at) => clock(at * 1000, u.scales.x.max - u.scales.x.min < 600)), space: 75 },
      { ...axis, values: whole, size: 84, space: 34, ...(chart.base ? { incrs: POWERS } : {}) },
    ],
    series: [
      { label: "Time", value: (u, at) => known(at) ? clock(at * 1000) : NONE },
      ...chart.lines.map((line) => ({
        label: line.name, stroke: colour(line.colour), width: 2, dash: line.dash,
        fill: line.fill ? colour(line.colour) + "38" : undefined, value: (u, value) => chart.show(value),
      })),
    ],
  };
}

// What a chart shows, in words: for those who do not see it, and below it for all.
function summary(chart, steps) {
  const told = chart.lines.map((line) => {
    const values = line.of(steps).filter(known);
    if (!values.length) return null;
    const now = values[values.length - 1], low = Math.min(...values), high = Math.max(...values);
    return `${line.name}: last ${chart.show(now)}, between ${chart.show(low)} and ${chart.show(high)}`;
  });
  const seconds = steps.end_ms.length * steps.step_seconds;
  return `${chart.what} over ${span(seconds)}. ${told.filter(known).join("; ")}.`;
}

// At most a dozen steps, evenly over the time.
function asTable(chart, steps) {
  const length = steps.end_ms.length, every = Math.max(1, Math.ceil(length / 12));
  const rows = [];
  for (let at = length - 1; at >= 0; at -= every) rows.unshift(at);
  const head = element("tr", {}, ...["Time", ...chart.lines.map((line) => line.name)].map((name, at) =>
    element("th", { scope: "col", class: at ? "number" : "" }, name)));
  const body = rows.map((at) => element("tr", {},
    element("th", { scope: "row" }, clock(steps.end_ms[at])),
    ...chart.lines.map((line) => element("td", { class: "number" }, chart.show(line.of(steps)[at])))));
  return element("table", {}, element("caption", {}, `${chart.what}, some steps`),
    element("thead", {}, head), element("tbody", {}, ...body));
}

function draw(chart) {
  const figure = $(chart.id), steps = history[shown];
  const isEmpty = !steps || steps.end_ms.length < 2 || chart.lines.every((line) => !line.of(steps).some(known));
  if (isEmpty) {
    if (chart.plot) chart.plot.destroy();
    chart.plot = null;
    chart.parts = null;
    const wait = shown === "hour" ? "its steps are 5 seconds long" : "its steps are 5 minutes long";
    const few = steps && steps.end_ms.length >= 2 ? "too little traffic yet" : `there is no history yet, ${wait}`;
    figure.replaceChildren(element("p", { class: "empty" }, `${chart.what}: ${few}.`));
    return;
  }
  if (!chart.parts) {
    const place = element("div", { class: "plot", role: "img" });
    const caption = element("figcaption");
    const more = element("details", {}, element("summary", {}, "As a table"), element("div"));
    more.addEventListener("toggle", () => draw(chart));
    figure.replaceChildren(place, caption, more);
    chart.parts = { place, caption, more };
  }
  const { place, caption, more } = chart.parts;
  const text = summary(chart, steps);
  say(caption, text);
  place.setAttribute("aria-label", text);
  if (more.open) more.lastElementChild.replaceChildren(asTable(chart, steps));
  const data = [steps.end_ms.map((ms) => ms / 1000), ...chart.lines.map((line) => line.of(steps))];
  const space = Math.floor(place.clientWidth);
  if (!chart.plot) chart.plot = new uPlot(options(chart, space), data, place);
  else {
    if (chart.plot.width !== space) chart.plot.setSize({ width: space, height: chart.plot.height });
    chart.plot.setData(data);
  }
}

function redraw() {
  for (const chart of CHARTS) {
    if (chart.plot) chart.plot.destroy();
    chart.plot = null;
    draw(chart);
  }
  if (last) curves(last);
}

// ---------------------------------------------------------------- curves

function vector(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

const points = (from, to) => {
  const change = 100 * (to - from);
  return `${change < 0 ? "−" : "+"}${number(Math.abs(change), 1)}\u00a0points`;
};

// The hit rate with other sizes: where the host is now, and where the next larger size is.
function curve(id, what, given, present, keys, sampled) {
  const figure = $(id);
  if (keys < LEAST_KEYS || sampled === 0 || given.length < 2) {
    const why = keys < LEAST_KEYS ? `too little traffic yet: ${number(keys)} keys of ${number(LEAST_KEYS)}` : "there is no estimate yet";
    const old = figure.querySelector(".empty");
    if (old) say(old, `To estimate other sizes, ${why}.`);
    else figure.replaceChildren(element("p", { class: "empty" }, `To estimate other sizes, ${why}.`));
    return;
  }
  const sizes = [...given].sort((a, b) => a.capacity_bytes - b.capacity_bytes);
  const near = (a, b) => Math.abs(a.capacity_bytes - present) <= Math.abs(b.capacity_bytes - present) ? a : b;
  const here = sizes.reduce(near);
  const larger = sizes.filter((point) => point.capacity_bytes > here.capacity_bytes);
  // The first that is half as large again, or more: a step that somebody would buy.
  const there = larger.find((point) => point.capacity_bytes >= 1.5 * here.capacity_bytes) || larger[larger.length - 1];
  const named = (point) => point.capacity_bytes === 0 ? `no ${what}` : size(point.capacity_bytes);
  const more = there && `+${size(there.capacity_bytes - here.capacity_bytes)}`;
  const text = `Here you are: ${named(here)}, ${percent(here.hit_ratio)} hits.` +
    (there ? ` ${more} is there: ${percent(there.hit_ratio)} (${points(here.hit_ratio, there.hit_ratio)}).` : " No larger size was estimated.");

  if (!figure.querySelector("svg")) {
    const lines = element("table", {}, element("caption", {}, `Hits with another size of ${what}`),
      element("thead", {}, element("tr", {}, ...["Size", "Hits", "Change"].map((name, at) =>
        element("th", { scope: "col", class: at ? "number" : "" }, name)))), element("tbody"));
    figure.replaceChildren(vector("svg", { role: "img" }), element("figcaption"),
      element("details", {}, element("summary", {}, "As a table"), lines));
  }
  const svg = figure.querySelector("svg");
  say(figure.querySelector("figcaption"), text);
  const rows = sizes.map((point) => element("tr", {},
    element("th", { scope: "row" }, named(point) + (point === here ? " (here)" : "")),
    element("td", { class: "number" }, percent(point.hit_ratio)),
    element("td", { class: "number" }, point === here ? NONE : points(here.hit_ratio, point.hit_ratio))));
  figure.querySelector("tbody").replaceChildren(...rows);

  const wide = Math.max(240, Math.floor(figure.clientWidth)), high = 210;
  const box = { left: 46, right: wide - 14, top: 26, bottom: high - 28 };
  const most = sizes[sizes.length - 1].capacity_bytes;
  const best = Math.max(...sizes.map((point) => point.hit_ratio));
  const roof = Math.min(1, Math.max(0.1, Math.ceil(best * 11) / 10));
  const x = (bytes) => box.left + (box.right - box.left) * Math.sqrt(bytes / most);
  const y = (ratio) => box.bottom - (box.bottom - box.top) * (ratio / roof);
  const drawn = [];
  for (const part of [0, 0.5, 1]) {
    const at = y(part * roof);
    drawn.push(vector("line", { class: "axis", x1: box.left, x2: box.right, y1: at, y2: at }));
    drawn.push(vector("text", { class: "tick", x: box.left - 6, y: at + 4, "text-anchor": "end" }, `${number(100 * part * roof)}\u00a0%`));
  }
  // Sizes below the axis, where there is room for them; the present one always.
  let taken = [];
  for (const point of [here, ...(there ? [there] : []), ...sizes]) {
    const at = x(point.capacity_bytes), half = 30;
    const middle = Math.min(Math.max(at, half), wide - half);
    if (taken.some((other) => Math.abs(other - middle) < 2 * half + 4)) continue;
    taken.push(middle);
    drawn.push(vector("text", { class: "tick", x: middle, y: high - 8, "text-anchor": "middle" }, point.capacity_bytes === 0 ? "none" : size(point.capacity_bytes)));
  }
  const path = sizes.map((point) => `${x(point.capacity_bytes).toFixed(1)},${y(point.hit_ratio).toFixed(1)}`);
  drawn.push(vector("line", { class: "guide", x1: x(here.capacity_bytes), x2: x(here.capacity_bytes), y1: y(here.hit_ratio), y2: box.bottom }));
  drawn.push(vector("polyline", { class: "curve", points: path.join(" ") }));
  for (const point of sizes) {
    const kind = point === here ? "here" : point === there ? "there" : "dot";
    drawn.push(vector("circle", { class: kind, cx: x(point.capacity_bytes), cy: y(point.hit_ratio), r: kind === "dot" ? 3 : 5.5 }));
  }
  // A curve rises: what stands below it begins right of its point, what stands above it ends left of its point. Near
  // the edges it is the other way round.
  const label = (point, words, lower) => {
    const at = x(point.capacity_bytes);
    const isBelow = lower > 0, isStart = isBelow ? at < 0.6 * wide : at < 0.4 * wide;
    const from = isStart ? at + 8 : isBelow ? at - 8 : Math.min(at + 8, wide - 4);
    drawn.push(vector("text", { class: "strong", x: from, y: y(point.hit_ratio) + lower, "text-anchor": isStart ? "start" : "end" }, words));
  };
  const isLow = y(here.hit_ratio) > box.bottom - 30;
  label(here, `here: ${percent(here.hit_ratio)}`, isLow ? -12 : 21);
  if (there) label(there, `${more}: ${percent(there.hit_ratio)}`, isLow ? -30 : -12);
  svg.setAttribute("viewBox", `0 0 ${wide} ${high}`);
  svg.setAttribute("height", high);
  svg.setAttribute("aria-label", text);
  svg.replaceChildren(...drawn);
}

function curves(frame) {
  const { estimates, lookups, pool } = frame;
  curve("memory-curve", "memory", estimates.memory_curve, pool.capacity_bytes, lookups.keys, estimates.sampled_keys);
  curve("disk-curve", "disk", estimates.disk_curve, estimates.disk_bytes, lookups.keys, estimates.sampled_keys);
}

// ---------------------------------------------------------------- the frame

let last = null;
let restarted = null;

// Items are {text, at, link}: in words, the element of the page that shows more of it, and the words that lead there.
function verdict(kind, headline, items) {
  const place = $("verdict");
  const text = JSON.stringify([kind, headline, items]);
  if (place.dataset.text === text) return;
  place.dataset.text = text;
  place.className = `verdict ${kind}`;
  const sign = { good: "✓", warn: "⚠", bad: "✕" }[kind];
  place.replaceChildren(element("strong", {}, `${sign} ${headline}`));
  const line = ({ text, at, link }) =>
    element("li", {}, ...typed(text), ...(at ? [" ", element("a", { href: `#${at}` }, link)] : []));
  if (items.length) place.append(element("ul", {}, ...items.map(line)));
  if (last) document.title = `${sign} ${last.host} – Forebay`;
}

const tier = (name) => TIERS[name] || CHECKS[name] || name;

function judge(frame) {
  const failed = frame.checks.filter((check) => check.finding === "fail");
  const impaired = frame.checks.filter((check) => check.finding === "warn");
  const place = (name) => frame.tiers.some((told) => told.name === name)
    ? { at: `tier-${name}`, link: "Show the tier" } : { at: "check-title", link: "Show the checks" };
  const what = ({ name, why }) => ({ text: `${tier(name)}: ${why}.`, ...place(name) });
  const items = [
    ...failed.map(what), ...impaired.map(what),
    ...frame.alarms.map(({ name, cause, hint }) =>
      ({ text: `Alarm: ${name}. Likely cause: ${cause}. What to do: ${hint}.`, ...ALARMS[name] })),
  ];
  if (restarted) items.push({ text: `The daemon was started again at ${clock(restarted)}; its counts began anew.` });
  if (!frame.is_live) return verdict("bad", "The daemon is stuck: restart it.", items);
  if (frame.pool.is_draining) return verdict("bad", "The daemon is ending: it grants nothing new.", items);
  if (!frame.is_ready) return verdict("bad", "The daemon is not ready.", items);
  if (impaired.length) return verdict("warn", "The daemon serves, but not with all its tiers.", items);
  if (frame.alarms.length) return verdict("warn", "The daemon serves, but something looks wrong.", items);
  verdict("good", "Nothing is wrong.", items);
}

function figures(frame) {
  const { lookups, estimates, pool, saved } = frame;
  const few = lookups.keys === 0 ? "too little traffic yet" : null;
  const guess = (ratio) => known(ratio) ? percent(ratio) : "not estimated yet";
  const hit = lookups.hit_ratio;
  const all = lookups.keys > 0 ? `${percent(lookups.hits / lookups.keys)} since the start` : "nothing was looked up";
  const whole = [
    ["Hit rate now", few || (known(hit) ? percent(hit) : "no lookups now"), all, "hit"],
    ["Ceiling", few || guess(estimates.ceiling_ratio), "a cache without limit", "ceiling"],
    ["Optimum", few || guess(estimates.optimum_ratio), "the best cache of this size", "optimum"],
    ["Keys a second", rate(lookups.keys_per_second), `${count(lookups.keys, "key", "keys")} since the start`, "keys"],
    ["Pool used", percent(pool.capacity_bytes ? pool.used_bytes / pool.capacity_bytes : null), `${size(pool.used_bytes)} of ${size(pool.capacity_bytes)}`, "used"],
    ["Lookup time, p99", lookups.p99_seconds === null ? "no lookups" : time(lookups.p99_seconds), `p50 ${time(lookups.p50_seconds)}, last minute`, "time"],
    ["Tokens saved", saved.tokens ? amount(saved.tokens) : "none told yet",
      saved.tokens ? `at least ${span(saved.prefill_seconds)} of prefill` : "engines tell what loads saved", "saved"],
  ];
  const place = $("figures");
  for (const [name, value, more, id] of whole) {
    if (!$(`figure-${id}`)) {
      place.append(element("div", { id: `figure-${id}` }, element("dt", {}, name),
        element("dd", {}, element("div", { class: "value" }), element("div", { class: "more" }))));
    }
    const made = $(`figure-${id}`);
    say(made.querySelector(".value"), value);
    made.querySelector(".value").classList.toggle("words", /^[a-z]/.test(value));
    say(made.querySelector(".more"), more);
  }
}

function windows(frame) {
  const now = { name: null, keys: null, hit_ratio: frame.lookups.hit_ratio, ceiling_ratio: null };
  const rows = [now, ...frame.windows].map((part) => [
    part.name === null ? { text: "Now", long: `the last ${span(frame.now_seconds)}` }
      : { text: WINDOWS[part.name] || part.name, long: part.seconds ? `the daemon has seen ${span(part.seconds)}` : "not seen yet" },
    part.hit_ratio === null ? "no lookups" : percent(part.hit_ratio),
    percent(part.ceiling_ratio),
    part.keys === null ? rate(frame.lookups.keys_per_second, "keys") : amount(part.keys),
  ]);
  table("windows", [["Time"], ["Hit rate", "number"], ["Ceiling", "number"], ["Keys", "number"]], rows, "");
}

// The pool's parts; what is pinned lies among the ready slots and those being filled.
function pool(frame) {
  const held = frame.pool;
  // What a tier fills is pinned too.
  const leased = Math.min(Math.max(0, held.pinned_bytes - held.promoting_bytes), held.ready_bytes);
  const parts = [
    ["ready", "Ready, can be evicted", Math.max(0, held.ready_bytes - leased), "blocks that can be hits"],
    ["leased", "Pinned", leased, "blocks in use: leased, verified, promoted or written to a tier"],
    ["reserved", "Reserved", held.reserved_bytes, "engines are filling it"],
    ["promoting", "Promoting", held.promoting_bytes, "a tier is filling it"],
    ["fenced", "Fenced", held.fenced_bytes, "out of use: a process may still use it"],
    ["free", "Free", Math.max(0, held.capacity_bytes - held.used_bytes), ""],
  ];
  const strip = $("strip");
  if (!strip.children.length) strip.append(...parts.map(([kind]) => element("i", { class: kind })));
  parts.forEach(([, , bytes], at) => width(strip.children[at], bytes / held.capacity_bytes));
  const rows = parts.map(([kind, name, bytes, long]) =>
    [{ text: name, long, key: kind }, size(bytes), percent(bytes / held.capacity_bytes)]);
  const huge = known(held.huge_bytes) ? `${percent(held.populated_bytes ? held.huge_bytes / held.populated_bytes : 0)} on huge pages` : "huge pages are not counted yet";
  rows.push([{ text: "Backed by memory", long: huge }, size(held.populated_bytes), percent(held.populated_bytes / held.capacity_bytes)]);
  table("pool", [["Part"], ["Size", "number"], ["Share", "number"]], rows, "");

}

function misses(frame) {
  const rows = frame.misses.filter((miss) => miss.keys > 0).sort((a, b) => b.share_ratio - a.share_ratio || b.keys - a.keys);
  table("misses", [["Reason"], ["Now", "number"], ["Since the start", "number"], ["Of misses, 15 min", "number"]],
    rows.map((miss) => {
      const [name, long] = REASONS[miss.reason] || [miss.reason, ""];
      return [{ text: name, long }, rate(miss.keys_per_second, "keys"), count(miss.keys, "key", "keys"),
        { text: percent(miss.share_ratio), bar: miss.share_ratio || 0 }];
    }), frame.lookups.keys ? "No key missed." : "Too little traffic yet: nothing was looked up.");
}

function tiers(frame) {
  const rows = frame.tiers.map((told) => {
    const kind = told.state === "serving" ? (told.trouble ? "warn" : "good") : told.state === "opening" ? "warn" : "bad";
    const sign = { good: "✓", warn: "⚠", bad: "✕" }[kind];
    const waiting = [
      [told.loading_blocks, "on the way up"], [told.waiting_blocks, "to be written"], [told.storing_blocks, "being written"],
      [told.waiting_operations, "operations not yet submitted"],
    ].filter(([blocks]) => blocks > 0).map(([blocks, what]) => `${number(blocks)} ${what}`).join(", ");
    const isPool = told.name === "pool";
    const capacity = known(told.capacity_bytes) ? `of ${size(told.capacity_bytes)}` : "";
    return [
      { text: tier(told.name), long: told.is_shared ? "shared with other hosts" : isPool ? "host memory" : "of this host" },
      { text: `${sign} ${told.state}`, mark: kind, long: told.trouble },
      known(told.held_bytes) ? { text: size(told.held_bytes), long: capacity } : NONE,
      frame.lookups.hits === 0 ? "none yet" : { text: percent(told.share_ratio), bar: told.share_ratio || 0 },
      speed(told.up_bytes_per_second),
      speed(told.down_bytes_per_second),
      time(told.p50_seconds), time(told.p99_seconds),
      waiting || (isPool ? NONE : "nothing"),
    ];
  });
  table("tiers", [["Tier"], ["State", "text"], ["Holds", "number"], ["Of hits, 15 min", "number"], ["Up", "number"],
    ["Down", "number"], ["p50", "number"], ["p99", "number"], ["Blocks waiting", "text"]], rows, "",
    (at) => `tier-${frame.tiers[at].name}`);
}

function engines(frame) {
  const rows = frame.engines.map((engine) => {
    const [mark, text, long] = STATES[engine.state] || ["", engine.state, ""];
    return [
      { text: engine.engine_id || "without a name" },
      { text, mark, long },
      engine.ranks ? `${engine.attached_ranks} of ${engine.ranks}` : NONE,
      rate(engine.keys_per_second, "keys"),
      engine.hit_ratio === null ? "no lookups" : percent(engine.hit_ratio),
      engine.keys ? { text: percent(engine.hits / engine.keys), long: `of ${count(engine.keys, "key", "keys")}` } : NONE,
      count(engine.leased_blocks, "block", "blocks"),
      count(engine.waiting_lookups, "lookup", "lookups"),
      engine.saved_tokens ? count(engine.saved_tokens, "token", "tokens") : NONE,
    ];
  });
  table("engines", [["Engine"], ["State", "text"], ["Workers attached", "number"], ["Lookups now", "number"],
    ["Hit rate now", "number"], ["Hit rate since it came", "number"], ["Leased", "number"], ["Waiting", "number"],
    ["Saved", "number"]], rows, "No engine has connected yet.");
}

function spaces(frame) {
  table("namespaces", [["Model"], ["Tenant", "text"], ["In the pool", "number"], ["Hit rate", "number"], ["Optimum", "number"]],
    frame.namespaces.map((space) => [
      { text: space.model || "without a name", long: space.namespace_id.slice(0, 8) }, space.tenant || NONE,
      { text: size(space.ready_bytes), long: count(space.ready_blocks, "block", "blocks") },
      percent(space.hit_ratio), percent(space.optimum_ratio),
    ]), "The pool holds no block yet.");
  table("tenants", [["Tenant"], ["Namespaces", "number"], ["In the pool", "number"]],
    frame.tenants.map((tenant) => [tenant.tenant || "without a name", number(tenant.namespaces), size(tenant.ready_bytes)]),
    "The pool holds no block yet.");
  say($("left-out"), frame.left_out ? `${number(frame.left_out)} more engines, namespaces and tenants are not shown.` : "");
}

function checks(frame) {
  const words = { ok: ["good", "✓ holds"], warn: ["warn", "⚠ impaired"], fail: ["bad", "✕ fails"] };
  table("checks", [["Check"], ["Finding", "text"], ["Why", "text"]], frame.checks.map((check) => {
    const [mark, text] = words[check.finding] || ["warn", check.finding];
    return [tier(check.name), { text, mark }, check.why];
  }), "");
}

function show(frame) {
  say($("host"), `on ${frame.host}`);
  say($("about"), `Version ${frame.version}, up ${span(frame.uptime_seconds)}, ` +
    `${count(frame.engines.length, "engine or client", "engines and clients")}. As of ${clock(frame.at_ms)}.`);
  judge(frame);
  for (const part of [figures, windows, pool, misses, tiers, engines, spaces, checks]) part(frame);
  curves(frame);
}

// ---------------------------------------------------------------- asking

let asked = -Infinity, timer = 0, isAsking = false, since = null;

function address() {
  if (!last) return `${base}frame.json`;
  return `${base}frame.json?boot=${last.boot}&hour_last=${history.hour.last}&day_last=${history.day.last}`;
}

async function ask() {
  const reply = await fetch(address(), { cache: "no-store", signal: AbortSignal.timeout(DEADLINE_MS) });
  if (!reply.ok) throw new Error(`it answered with status ${reply.status}`);
  return reply.json();
}

function take(frame) {
  const isSame = last && last.boot === frame.boot;
  if (last && !isSame) restarted = Date.now();
  const old = history[shown] && isSame ? history[shown].last : -1;
  for (const name of ["hour", "day"]) history[name] = joined(isSame ? history[name] : null, frame[name], MOST[name]);
  const isFirst = !last;
  last = frame;
  since = null;
  $("live").classList.remove("stale");
  show(frame);
  if (history[shown].last !== old) CHARTS.forEach(draw);
  // The rows are there now.
  if (isFirst && location.hash.length > 1) $(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}

function gone(error) {
  since = since || Date.now();
  const why = error.name === "TimeoutError" ? "it did not answer within 5 s" : error.name === "TypeError" ? "no connection" : error.message;
  const items = last ? [{ text: `What is shown below is of ${clock(last.at_ms)}.` }] : [];
  items.push({ text: "Engines go on without the cache. This page asks again every 2 s." });
  $("live").classList.toggle("stale", true);
  verdict("bad", `The daemon does not answer since ${clock(since)}: ${why}.`, items);
}

async function poll() {
  clearTimeout(timer);
  if (isAsking || document.visibilityState !== "visible") return;
  const wait = asked + LEAST_MS - performance.now();
  if (wait > 0) {
    timer = setTimeout(poll, wait);
    return;
  }
  isAsking = true;
  asked = performance.now();
  let frame = null, failure = null;
  try {
    frame = await ask();
  } catch (error) {
    failure = error;
  }
  isAsking = false;
  timer = setTimeout(poll, PERIOD_MS);
  if (failure) gone(failure);
  else take(frame);
}

for (const name of ["hour", "day"]) {
  $(`span-${name}`).addEventListener("click", () => {
    shown = name;
    for (const each of ["hour", "day"]) $(`span-${each}`).setAttribute("aria-pressed", String(each === name));
    CHARTS.forEach(draw);
  });
}
document.addEventListener("visibilitychange", poll);
dark.addEventListener("change", redraw);
let resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => last && redraw(), 150);
});
poll();

})();
