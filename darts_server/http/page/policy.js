// Form for the runtime settings, built from their schema.
class Policy {
  #schema = null;
  #current = {};
  #changes = new Map(); // by name: the new value, or an Error where there is none

  constructor() {
    byId("settings").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("settings").addEventListener("input", (event) => event.target.dataset.setting && this.#edited(event.target.dataset.setting));
    byId("reset").addEventListener("click", () => this.#fill());
  }

  // Reloads the settings, unless the user has changed some.
  async load() {
    if (this.#changes.size) return;
    try {
      this.#schema ??= await ask("v1/policy/schema");
      this.#current = await ask("v1/policy");
      if (!byId("fields").childElementCount) this.#build();
      this.#fill();
    } catch (error) {
      say("answer", error.message, { class: "note bad" });
    }
  }

  // --- the form ------------------------------------------------------------

  #build() {
    const fields = Object.entries(this.#schema.properties).map(([name, schema]) => {
      const type = typed(schema);
      const attributes = { id: `set-${name}`, "data-setting": name, "aria-describedby": `help-${name} error-${name}` };
      const input = type.enum
        ? element("select", attributes, ...type.enum.map((value) => element("option", {}, value)))
        : element("input", { ...attributes, inputmode: "decimal", autocomplete: "off", placeholder: type.optional ? "not set" : null });
      const line = element("span", { class: "line" }, element("label", { for: `set-${name}` }, name), input);
      const help = element("p", { id: `help-${name}`, class: "note" }, `${schema.description ?? ""} ${ranged(type)}`);
      return element("div", { class: "field", id: `field-${name}` }, line, element("p", { id: `error-${name}`, class: "error" }), help);
    });
    byId("fields").replaceChildren(...fields);
  }

  #fill() {
    for (const name of Object.keys(this.#schema.properties)) {
      byId(`set-${name}`).value = this.#current[name] ?? "";
      this.#mark(name, "");
      byId(`field-${name}`).classList.remove("changed");
    }
    this.#changes.clear();
    say("answer", "", { class: "note" });
    this.#preview();
  }

  #edited(name) {
    const value = parsed(byId(`set-${name}`).value.trim(), typed(this.#schema.properties[name]));
    if (value === this.#current[name]) this.#changes.delete(name);
    else this.#changes.set(name, value);
    byId(`field-${name}`).classList.toggle("changed", this.#changes.has(name));
    this.#mark(name, value instanceof Error ? value.message : "");
    say("answer", "", { class: "note" });
    this.#preview();
  }

  #mark(name, message) {
    byId(`set-${name}`).setAttribute("aria-invalid", String(message !== ""));
    say(`error-${name}`, message);
  }

  #preview() {
    const wrong = [...this.#changes.values()].some((value) => value instanceof Error);
    const lines = [...this.#changes].map(([name, value]) => {
      if (value instanceof Error) return element("div", { class: "bad" }, `${name} ${value.message}`);
      return element("div", {}, element("code", {}, `${name}: ${JSON.stringify(this.#current[name])} → ${JSON.stringify(value)}`));
    });
    byId("changes").replaceChildren(...(lines.length ? lines : [element("span", { class: "muted" }, "No changes.")]));
    byId("send").textContent = lines.length ? `Apply ${several(lines.length, "change")}` : "Apply";
    byId("send").disabled = !lines.length || wrong;
    byId("reset").disabled = !lines.length;
  }

  async #send() {
    if (byId("send").disabled) return;
    keys.admin = byId("admin-key").value;
    const body = JSON.stringify(Object.fromEntries(this.#changes));
    const headers = { "Content-Type": "application/json" };
    try {
      this.#current = await ask("v1/policy", { method: "PATCH", body, headers }, keys.admin || keys.api);
      this.#fill();
      say("answer", "Applied to groups that are planned from now on.", { class: "note good" });
    } catch (error) {
      this.#refused(error);
    }
  }

  #refused(error) {
    const name = error.field;
    if (name && byId(`set-${name}`)) {
      this.#mark(name, error.message.replace(new RegExp(`^${name}:? `), ""));
      byId(`set-${name}`).focus();
      say("answer", `Nothing was changed: see ${name}.`, { class: "note bad" });
    } else {
      say("answer", `Nothing was changed: ${error.message}`, { class: "note bad" });
    }
  }
}

// The one type of a setting, and whether it may be null.
function typed(schema) {
  const some = schema.anyOf ?? [schema];
  const type = some.find((each) => each.type !== "null");
  return { ...type, optional: some.length > 1 };
}

function parsed(text, type) {
  if (type.enum) return text;
  if (text === "") return type.optional ? null : new Error("must be set");
  if (type.type === "string") return text;
  const number = Number(text);
  if (!Number.isFinite(number) || (type.type === "integer" && !Number.isInteger(number))) {
    return new Error(type.type === "integer" ? "must be a whole number" : "must be a number");
  }
  if (number < type.minimum || number > type.maximum) return new Error(`must be ${ranged(type).replace(/\.$/, "").toLowerCase()}`);
  return number;
}

function ranged({ minimum, maximum }) {
  if (minimum === undefined) return "";
  return maximum === undefined ? `At least ${minimum}.` : `${minimum} to ${maximum}.`;
}
