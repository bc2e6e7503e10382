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

// Opens a group in the tab for look-ups.
function openGroup(id) {
  selectTab(byId("tab-look"));
  lookup.group(id);
}

// --- events of the server ---------------------------------------------------

// Receives an event, or a lost connection as `lost` or `locked` with a message.
function receive(event, data) {
  if (event === "snapshot") model.snapshot(data);
  else if (event === "update") model.update(data);
  else return handleLoss(event, data);
  showConnection("live", "pill on");
  showHealth();
}

function handleLoss(event, message) {
  model.running = 0; // stops the clock
  timeline.invalidate();
  if (event !== "locked") return showConnection("no connection", "pill off", `No connection: ${message}`);
  const why = apiKey ? "This key was refused." : "This server needs an API key.";
  showConnection("needs a key", "pill off", why);
  askForKey(why);
}

// Shows the state of the connection; `look` is a class. Without groups, shows why there are none.
function showConnection(text, look, title = "") {
  setText("connection", text, { class: look, title });
  const empty = model.groups.size === 0;
  byId("empty").hidden = !empty;
  byId("empty-more").hidden = text !== "live";
  if (empty) setText("empty-title", text === "live" ? "No groups yet" : `${title || "No data yet"}`);
}

function showHealth() {
  const { weights, rewards, store_fault: fault } = model.health;
  setText("running", countOf(model.running, "group"));
  setText("running-more", countOf(model.candidates, "candidate"));
  setText("rate", model.rate === null ? "–" : count(model.rate));
  setText("weights", `version ${weights.version}`, { title: weights.last?.error ?? "" });
  setText("weights-more", weights.state === "serving" ? describeUpdate(weights.last) : `update: ${weights.state}`);
  setText("rewards", rewards ? `${percent(rewards.pass_rate)} correct` : "–");
  setText("rewards-more", rewards ? describeRewards(rewards) : "none reported");
  setText("store", fault ? "not written" : "saved", { class: fault ? "bad" : "", title: fault ?? "" });
  setText("store-more", fault ?? "learned state");
}

function describeUpdate(last) {
  if (last === null) return "no update yet";
  const took = total(Object.values(last.seconds));
  return `last update ${last.outcome}${took ? `, ${seconds(took)}` : ""}`;
}

function describeRewards({ rewarded_groups: groups, zero_variance_groups: equal }) {
  return groups ? `${percent(equal / groups)} of groups all equal` : "no group is complete";
}

// Polls the engine's health.
async function showEngine() {
  const answer = await fetch("../health", { headers: authHeaders() }).catch(() => null);
  alive = answer?.ok ?? false;
  setText("engine", alive ? "alive" : "not responding", { class: alive ? "good" : "bad" });
  setText("engine-more", answer ? `health ${answer.status}` : "no connection");
}

async function showSettings() {
  const settings = await getJson("v1/policy").catch((error) => ({ error: error.message }));
  byId("settings").replaceChildren(definitionList(Object.entries(settings).map(([name, value]) => [name, formatSetting(value)])));
}

const formatSetting = (value) => (Array.isArray(value) ? value.join(", ") : String(value ?? "not set"));

// --- user input ---------------------------------------------------

function selectTab(tab, focus = false) {
  for (const each of document.querySelectorAll('[role="tab"]')) {
    each.setAttribute("aria-selected", String(each === tab));
    each.tabIndex = each === tab ? 0 : -1;
    byId(each.getAttribute("aria-controls")).hidden = each !== tab;
  }
  if (focus) tab.focus();
  if (tab.id === "tab-policy") showSettings();
  charts.invalidate();
}

function askForKey(why) {
  setText("key-why", `${why} It is kept only in this page, until you close it.`);
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

function setPaused(value) {
  paused = value;
  byId("pause").setAttribute("aria-pressed", String(paused));
  if (!paused) return following.start();
  following.stop();
  model.running = 0;
  showConnection("paused", "pill");
}

// Returns a curl command for this server.
function exampleCommand() {
  const key = apiKey ? " \\\n  -H 'Authorization: Bearer KEY'" : "";
  const body = '{\n  "prompts": [{"text": "1 + 1 ="}], "group_size": 8,\n  "sampling": {"max_tokens": 200, "temperature": 1.0}\n}';
  return `curl ${new URL("v1/rollouts", location.href)}${key} -d '${body}'`;
}

function showAddress() {
  setText("address", location.host);
  setText("base", new URL("../v1", location.href).href);
  setText("command", exampleCommand());
}

for (const tab of document.querySelectorAll('[role="tab"]')) {
  tab.addEventListener("click", () => selectTab(tab));
  tab.addEventListener("keydown", (event) => {
    const all = [...document.querySelectorAll('[role="tab"]')];
    const steps = { ArrowRight: 1, ArrowLeft: -1 };
    const place = { Home: 0, End: all.length - 1 }[event.key] ?? all.indexOf(tab) + (steps[event.key] ?? NaN);
    if (Number.isNaN(place)) return;
    event.preventDefault();
    selectTab(all.at(place % all.length), true);
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
  navigator.clipboard?.writeText(exampleCommand()).then(() => setText("copy", "Copied"), () => setText("copy", "Selected"));
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) following.stop();
  else if (!paused) following.start();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readColours();
  charts.invalidate();
  timeline.invalidate();
});

function drawFrame(time) {
  timeline.drawIfChanged(time);
  charts.drawIfChanged();
  lookup.showAwaited();
  requestAnimationFrame(drawFrame);
}

showAddress();
showEngine();
setInterval(() => document.hidden || showEngine(), 1000 * HEALTH_SECONDS);
following.start();
requestAnimationFrame(drawFrame);
