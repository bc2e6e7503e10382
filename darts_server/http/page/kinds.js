// States of a candidate: the name in the style sheet, and the text.
const KINDS = {
  waiting: "not started",
  running: "running",
  finished: "finished, not decided",
  short: "selected, short",
  long: "selected, tail",
  long_truncated: "selected, sampled, at limit",
  fill: "selected, at limit",
  survivor: "selected, not pruned",
  reward: "selected by its reward",
  longer_than_needed: "stopped, too long",
  tail_pruned: "stopped, tail sampled",
  pruned: "pruned",
  middle: "finished, not needed",
  truncated: "at limit, not needed",
  not_sampled: "finished, not sampled",
  zero_variance: "in a group of equal rewards",
  decided: "stopped, others decide",
  restarted: "restarted",
  carried: "carried over",
  aborted: "aborted; its caller got what it had generated",
  load: "given up, engine full",
  failed: "failed",
  cancelled: "cancelled",
};
const MARKS = { cut: "cut there", resumed: "went on from an earlier batch", tool: "no request, in a tool" };
const SELECTED = ["short", "long", "long_truncated", "fill", "survivor", "reward"];
const OPEN = ["waiting", "running", "finished"];
const ENDS = Object.keys(KINDS).filter((kind) => !OPEN.includes(kind));

// The kind of a candidate, as a key of `KINDS`.
const kindOf = (candidate) => candidate.selected_as ?? candidate.reason ?? candidate.state;

// Colours of the current colour scheme, for canvases.
let colours = {};
let hatch = null; // stripes over tool time
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = [...Object.keys(KINDS), "text", "muted", "line", "panel", "generated", ...Object.keys(MARKS)];
  colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  hatch = makeHatch(colours.tool);
}

const byId = (id) => document.getElementById(id);

// Creates an element. Attributes "on…" are listeners; false and null attributes, and null children are left out.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

// Sets the text and attributes of an element. Writes only changes, so that the same text is not laid out or announced again.
function setText(id, text, attributes = {}) {
  const place = byId(id);
  if (place.textContent !== text) place.textContent = text;
  for (const [name, value] of Object.entries(attributes)) {
    if (place.getAttribute(name) !== value) place.setAttribute(name, value);
  }
}

// Numbers as text.
const count = (number) => Math.round(number).toLocaleString("en-US");
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
const countOf = (number, what) => `${count(number)} ${what}${number === 1 ? "" : "s"}`;

function seconds(value) {
  if (value >= 100) return `${count(value)} s`;
  return value >= 10 ? `${value.toFixed(1)} s` : `${value.toFixed(2)} s`;
}

// Replaces the middle of a text of more than `max` characters.
function shorten(text, max) {
  return text.length <= max ? text : `${text.slice(0, Math.ceil(max / 2) - 1)}…${text.slice(1 - Math.floor(max / 2))}`;
}

// Fits a canvas to its place on the screen and clears it. Returns its context, which draws in CSS pixels.
function prepareCanvas(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  const [wide, high] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

// Returns a pattern of diagonal stripes for canvases.
function makeHatch(colour) {
  const tile = new OffscreenCanvas(4, 4);
  const context = tile.getContext("2d");
  context.fillStyle = colour;
  for (let y = 0; y < 4; y += 1) for (let x = 0; x < 4; x += 1) if ((x + y) % 4 < 2) context.fillRect(x, y, 1, 1);
  return context.createPattern(tile, "repeat");
}

// Returns about `about` round numbers from `min` to `max` as `found`, and the step between them.
function ticks(min, max, about) {
  const rough = (max - min) / about || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(min / step) * step; at <= max + step * 1e-9; at += step) found.push(at);
  return { step, found };
}
