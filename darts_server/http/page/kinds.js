// What can become of a candidate: its name in the style sheet, and in words.
const KINDS = {
  waiting: "not started",
  running: "running",
  finished: "ended, fate open",
  short: "selected, short",
  long: "selected, tail",
  fill: "selected, at limit",
  balanced: "selected, quality",
  longer_than_needed: "stopped, too long",
  tail_pruned: "stopped, tail taken",
  pruned: "pruned, quality",
  middle: "ended, not needed",
  truncated: "at limit, not needed",
  decided: "stopped, vote certain",
  restarted: "begun anew",
  watched: "watched only",
  failed: "failed",
  cancelled: "given up",
};
const SELECTED = ["short", "long", "fill", "balanced"];
const OPEN = ["waiting", "running", "finished"];
const ENDS = Object.keys(KINDS).filter((kind) => !OPEN.includes(kind));

const kindOf = (candidate) => candidate.selected_as ?? candidate.reason ?? candidate.state;

// Colours of the scheme that is in force, for canvases.
let colours = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = [...Object.keys(KINDS), "text", "muted", "line", "stripe", "panel", "cut", "accent", "generated"];
  colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

const byId = (id) => document.getElementById(id);

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

// Writes only what changed, so that nothing is laid out or announced anew for the same text.
function say(id, text, attributes = {}) {
  const place = byId(id);
  if (place.textContent !== text) place.textContent = text;
  for (const [name, value] of Object.entries(attributes)) {
    if (place.getAttribute(name) !== value) place.setAttribute(name, value);
  }
}

const count = (number) => Math.round(number).toLocaleString("en-US");
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
const several = (number, what) => `${count(number)} ${what}${number === 1 ? "" : "s"}`;

function seconds(value) {
  if (value >= 100) return `${count(value)} s`;
  return value >= 10 ? `${value.toFixed(1)} s` : `${value.toFixed(2)} s`;
}

function short(text, most) {
  return text.length <= most ? text : `${text.slice(0, Math.ceil(most / 2) - 1)}…${text.slice(1 - Math.floor(most / 2))}`;
}

// Fits a canvas to its place on the screen; its context draws in CSS pixels.
function prepared(canvas, width, height) {
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

// Round numbers from 0 or ``low`` to ``high``, about ``about`` of them.
function ticks(low, high, about) {
  const rough = (high - low) / about || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return { step, found };
}
