// Connects the parts, and shows the health of the server.
const HEALTH_SECONDS = 15; // each request is a line in the server's log
const model = new Model();
readColours();
const lookup = new Lookup(model);
const timeline = new Timeline(model, openGroup);
const charts = new Charts(model);
const following = new Following(receive);
let alive = null;
let paused = false;

function openGroup(id) {
  select(byId("tab-look"));
  lookup.group(id);
}

// --- events of the server ---------------------------------------------------

function receive(event, data) {
  if (event === "snapshot") model.snapshot(data);
  else if (event === "update") model.update(data);
  else return lost(event, data);
  connected("live", "pill on");
  showHealth();
}

function lost(event, message) {
  model.running = 0; // stops the clock
  timeline.touch();
  if (event !== "locked") return connected("no connection", "pill off", `No connection: ${message}`);
  const why = apiKey ? "This key was refused." : "This server needs an API key.";
  connected("needs a key", "pill off", why);
  askForKey(why);
}

function connected(text, look, title = "") {
  say("connection", text, { class: look, title });
  const empty = model.groups.size === 0;
  byId("empty").hidden = !empty;
  byId("empty-more").hidden = text !== "live";
  if (empty) say("empty-title", text === "live" ? "No groups yet" : `${title || "No data yet"}`);
}

function showHealth() {
  const { weights, rewards, store_fault: fault } = model.health;
  say("running", several(model.running, "group"));
  say("running-more", several(model.candidates, "candidate"));
  say("rate", model.rate === null ? "–" : count(model.rate));
  say("weights", `version ${weights.version}`, { title: weights.last?.error ?? "" });
  say("weights-more", weights.state === "serving" ? lastUpdate(weights.last) : `update: ${weights.state}`);
  say("rewards", rewards ? `${percent(rewards.pass_rate)} correct` : "–");
  say("rewards-more", rewards ? equalRewards(rewards) : "none reported");
  say("store", fault ? "not written" : "saved", { class: fault ? "bad" : "", title: fault ?? "" });
  say("store-more", fault ?? "learned state");
}

function lastUpdate(last) {
  if (last === null) return "no update yet";
  const took = total(Object.values(last.seconds));
  return `last update ${last.outcome}${took ? `, ${seconds(took)}` : ""}`;
}

function equalRewards({ rewarded_groups: groups, zero_variance_groups: equal }) {
  return groups ? `${percent(equal / groups)} of groups all equal` : "no group is complete";
}

async function showEngine() {
  const answer = await fetch("../health", { headers: authorised() }).catch(() => null);
  alive = answer?.ok ?? false;
  say("engine", alive ? "alive" : "not responding", { class: alive ? "good" : "bad" });
  say("engine-more", answer ? `health ${answer.status}` : "no connection");
}

async function showSettings() {
  const settings = await ask("v1/policy").catch((error) => ({ error: error.message }));
  byId("settings").replaceChildren(listed(Object.entries(settings).map(([name, value]) => [name, shown(value)])));
}

const shown = (value) => (Array.isArray(value) ? value.join(", ") : String(value ?? "not set"));

// --- user input ---------------------------------------------------

function select(tab, focus = false) {
  for (const each of document.querySelectorAll('[role="tab"]')) {
    each.setAttribute("aria-selected", String(each === tab));
    each.tabIndex = each === tab ? 0 : -1;
    byId(each.getAttribute("aria-controls")).hidden = each !== tab;
  }
  if (focus) tab.focus();
  if (tab.id === "tab-policy") showSettings();
  charts.touch();
}

function askForKey(why) {
  say("key-why", `${why} It is kept only in this page, until you close it.`);
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

function setPaused(value) {
  paused = value;
  byId("pause").setAttribute("aria-pressed", String(paused));
  if (!paused) return following.start();
  following.stop();
  model.running = 0;
  connected("paused", "pill");
}

function command() {
  const key = apiKey ? " \\\n  -H 'Authorization: Bearer KEY'" : "";
  const body = '{\n  "prompts": [{"text": "1 + 1 ="}], "group_size": 8,\n  "sampling": {"max_tokens": 200, "temperature": 1.0}\n}';
  return `curl ${new URL("v1/rollouts", location.href)}${key} -d '${body}'`;
}

function showAddress() {
  say("address", location.host);
  say("base", new URL("../v1", location.href).href);
  say("command", command());
}

for (const tab of document.querySelectorAll('[role="tab"]')) {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    const all = [...document.querySelectorAll('[role="tab"]')];
    const steps = { ArrowRight: 1, ArrowLeft: -1 };
    const place = { Home: 0, End: all.length - 1 }[event.key] ?? all.indexOf(tab) + (steps[event.key] ?? NaN);
    if (Number.isNaN(place)) return;
    event.preventDefault();
    select(all.at(place % all.length), true);
  });
}
byId("pause").addEventListener("click", () => setPaused(!paused));
byId("open-key").addEventListener("click", () => askForKey("Sent with every request."));
byId("no-key").addEventListener("click", () => byId("key-dialog").close("cancel"));
byId("key-dialog").addEventListener("close", () => {
  if (byId("key-dialog").returnValue !== "ok") return;
  apiKey = byId("api-key").value;
  showAddress();
  following.stop();
  setPaused(false);
});
byId("copy").addEventListener("click", () => {
  getSelection().selectAllChildren(byId("command"));
  navigator.clipboard?.writeText(command()).then(() => say("copy", "Copied"), () => say("copy", "Selected"));
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) following.stop();
  else if (!paused) following.start();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readColours();
  charts.touch();
  timeline.touch();
});

function frame(time) {
  timeline.frame(time);
  charts.frame();
  lookup.frame();
  requestAnimationFrame(frame);
}

showAddress();
showEngine();
setInterval(() => document.hidden || showEngine(), 1000 * HEALTH_SECONDS);
following.start();
requestAnimationFrame(frame);
