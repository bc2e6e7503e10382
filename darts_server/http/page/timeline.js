// Every candidate as a bar over time, in blocks by group, the newest on top. Tool time of sessions is hatched. Draws what
// is in sight alone.
const LABELS = 148; // px on the left
const AXIS = 20;
const GAP = 7; // between groups
const LOWEST = 32; // a block: two lines of text
const FRAME_SECONDS = 1 / 15;

class Timeline {
  #model;
  #open;
  #blocks = [];
  #version = -1;
  #pitch = 0;
  #height = 0;
  #focus = null; // {id, index}: looked at, by mouse or keyboard
  #drawnAt = 0;
  #span = [0, 1];
  #dirty = true;

  constructor(model, open) {
    this.#model = model;
    this.#open = open;
    this.canvas = byId("bars");
    this.scroll = byId("scroll");
    this.scroll.addEventListener("scroll", () => this.invalidate(), { passive: true });
    new ResizeObserver(() => this.invalidate()).observe(this.scroll);
    for (const id of ["span", "pitch"]) byId(id).addEventListener("change", () => this.invalidate());
    this.canvas.addEventListener("mousemove", (event) => this.#focusUnderMouse(event));
    this.canvas.addEventListener("mouseleave", () => this.#setFocus(null));
    this.canvas.addEventListener("click", () => this.#focus && this.#open(this.#focus.id));
    this.canvas.addEventListener("keydown", (event) => this.#handleKey(event));
  }

  // Requests a new drawing in the next frame.
  invalidate() {
    this.#dirty = true;
  }

  // Draws changes at once, and running bars at most every `FRAME_SECONDS`. `time` is in milliseconds.
  drawIfChanged(time) {
    const barsGrow = this.#model.running && time - this.#drawnAt >= 1000 * FRAME_SECONDS;
    if (!barsGrow && !this.#dirty && this.#version === this.#model.version) return;
    if (this.scroll.clientHeight === 0) return;
    this.#drawnAt = time;
    this.#dirty = false;
    this.#layOut();
    this.#draw();
    if (this.#focus) this.#showDetail(false);
  }

  // --- where everything is -------------------------------------------------

  // Computes the place of each group's block, if the model or the pitch has changed.
  #layOut() {
    const pitch = Number(byId("pitch").value);
    if (this.#version === this.#model.version && this.#pitch === pitch) return;
    const newestBefore = this.#blocks[0]?.group;
    const heightBefore = this.#height;
    [this.#version, this.#pitch] = [this.#model.version, pitch];
    let top = AXIS + 4;
    this.#blocks = this.#model.newest.map((group) => {
      const height = Math.max(LOWEST, group.candidates.length * pitch);
      const block = { group, top, height, inset: Math.max(0, (height - group.candidates.length * pitch) / 2) };
      top += height + GAP;
      return block;
    });
    this.#height = top;
    this.#updateLegend();
    byId("spacer").style.height = `${Math.max(top, this.scroll.clientHeight)}px`;
    // New groups on top do not move the groups that a scrolled page shows.
    if (this.scroll.scrollTop > AXIS && newestBefore !== this.#blocks[0]?.group && heightBefore) {
      const newTop = this.#blocks.find((block) => block.group === newestBefore)?.top ?? AXIS + 4;
      this.scroll.scrollTop += newTop - AXIS - 4;
    }
  }

  // Lists the kinds of bars and marks that the groups have.
  #updateLegend() {
    const candidates = this.#blocks.flatMap(({ group }) => group.candidates.filter(Boolean));
    const found = new Set(candidates.flatMap((each) => [kindOf(each), each.cut && "cut", each.resumed && "resumed", each.tools && "tool"]));
    const shown = Object.entries({ ...KINDS, ...MARKS }).filter(([kind]) => found.has(kind));
    const names = shown.map(([kind]) => kind).join();
    if (byId("legend").dataset.shown === names) return;
    byId("legend").dataset.shown = names;
    const entry = ([kind, words]) => {
      const mark = element("i", { class: kind });
      if (kind !== "waiting" && kind !== "tool") mark.style.background = `var(--${kind})`;
      return element("li", {}, mark, words);
    };
    byId("legend").replaceChildren(...shown.map(entry));
  }

  #visibleBlocks() {
    const [from, to] = [this.scroll.scrollTop, this.scroll.scrollTop + this.scroll.clientHeight];
    return this.#blocks.filter((block) => block.top + block.height > from && block.top < to);
  }

  // Sets the span of time to the chosen seconds, or to all visible blocks.
  #fitSpan(blocks) {
    const chosenSeconds = Number(byId("span").value);
    const ends = blocks.map(({ group }) => group.ended ?? this.#model.time);
    const last = Math.max(...ends, -Infinity);
    const first = chosenSeconds ? last - chosenSeconds : Math.min(...blocks.map(({ group }) => group.began), Infinity);
    if (blocks.length) this.#span = [first, first + Math.max(last - first, 0.01) * 1.02];
  }

  // --- drawing -------------------------------------------------------------

  #draw() {
    const [width, height] = [this.scroll.clientWidth, this.scroll.clientHeight];
    this.canvas.style.height = `${height}px`;
    const context = prepareCanvas(this.canvas, width, height);
    const blocks = this.#visibleBlocks();
    this.#fitSpan(blocks);
    const [first, last] = this.#span;
    const at = (time) => LABELS + ((Math.min(Math.max(time, first), last) - first) / (last - first)) * (width - LABELS - 8);
    this.#drawGrid(context, at, width, height);
    for (const block of blocks) this.#drawBlock(context, block, at, width);
    this.#drawAxis(context, at, width);
    const { running } = this.#model;
    const candidates = this.#blocks.reduce((sum, { group }) => sum + group.candidates.length, 0);
    const shown = `${countOf(candidates, "candidate")} in ${countOf(this.#blocks.length, "group")}`;
    setText("shown", shown);
    setText("bars", "", { "aria-label": `${shown}, ${countOf(running, "group")} running` });
  }

  #drawGrid(context, at, width, height) {
    context.strokeStyle = colours.line;
    context.lineWidth = 1;
    context.beginPath();
    for (const tick of this.#ticks()) {
      const x = Math.round(at(tick.time)) + 0.5;
      context.moveTo(x, AXIS);
      context.lineTo(x, height);
    }
    context.stroke();
  }

  #ticks() {
    const [first, last] = this.#span;
    const { step, found } = ticks(0, last - first, 7);
    const digits = Math.max(0, -Math.floor(Math.log10(step)));
    return found.map((each) => ({ time: first + each, text: `${each.toFixed(digits)} s` }));
  }

  #drawAxis(context, at, width) {
    context.fillStyle = colours.panel;
    context.fillRect(0, 0, width, AXIS);
    context.fillStyle = colours.muted;
    context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    context.textBaseline = "middle";
    for (const tick of this.#blocks.length ? this.#ticks() : []) {
      const x = at(tick.time);
      context.textAlign = x > width - 30 ? "right" : "center";
      context.fillText(tick.text, Math.min(x, width - 4), AXIS / 2);
    }
    context.textAlign = "left";
  }

  #drawBlock(context, { group, top, height, inset }, at, width) {
    const y = top - this.scroll.scrollTop;
    context.strokeStyle = colours.line;
    context.beginPath();
    context.moveTo(0, Math.round(y + height + GAP / 2) + 0.5);
    context.lineTo(width, Math.round(y + height + GAP / 2) + 0.5);
    context.stroke();
    const visibleTop = Math.max(y, AXIS); // the label is visible while its block is
    this.#drawLabel(context, group, Math.min(visibleTop, y + height - LOWEST));
    // Only the bars between the upper and the lower edge of the canvas are drawn.
    const [upperEdge, lowerEdge] = [-y - inset, this.scroll.clientHeight - y - inset];
    const first = Math.max(0, Math.floor(upperEdge / this.#pitch));
    const end = Math.min(group.candidates.length, Math.ceil(lowerEdge / this.#pitch));
    for (let index = first; index < end; index += 1) {
      const candidate = group.candidates[index];
      if (candidate) this.#drawBar(context, group, candidate, y + inset + index * this.#pitch, at);
    }
  }

  #drawLabel(context, group, y) {
    const [selected, running] = ["selected", "running"].map((state) => group.candidates.filter((each) => each.state === state).length);
    const done = group.ended !== undefined;
    context.textBaseline = "top";
    context.fillStyle = colours.text;
    context.font = "600 11px system-ui, 'DejaVu Sans', sans-serif";
    context.fillText(shorten(group.prompt_key ?? group.group_id, 18), 10, y + 3);
    context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    const whole = !done || group.outcome === "completed" || group.outcome === "decided";
    context.fillStyle = whole ? colours.muted : colours.failed;
    const ended = whole ? `${selected} of ${group.started}` : group.outcome;
    const state = done ? `${ended} · ${seconds(group.ended - group.began)}` : `${running} of ${group.started} running`;
    context.fillText(state, 10, y + 17);
  }

  #drawBar(context, group, candidate, y, at) {
    const kind = kindOf(candidate);
    const thick = Math.max(2, this.#pitch - (this.#pitch > 4 ? 2 : 1));
    const end = candidate.stop ?? group.ended ?? this.#model.time;
    const start = candidate.start ?? end;
    const [began, from, to] = [at(group.began), at(start), at(end)];
    context.fillStyle = colours.waiting; // until the engine had it
    if (from - began > 1) for (let x = began; x < from; x += 4) context.fillRect(x, y + thick / 2, 2, 1);
    context.fillStyle = colours[kind] ?? colours.waiting;
    context.fillRect(from, y, Math.max(candidate.start === undefined ? 0 : 2, to - from), thick);
    context.fillStyle = hatch;
    for (const [begin, finish] of candidate.tools ?? []) {
      const [left, right] = [at(begin), at(Math.min(finish ?? end, end))];
      if (right - left > 0.5) context.fillRect(left, y, right - left, thick);
    }
    if (candidate.resumed) {
      context.fillStyle = colours.resumed;
      context.fillRect(from, y - 1, 4, thick + 2);
    }
    if (candidate.cut) {
      context.fillStyle = colours.cut;
      context.fillRect(to - 2, y - 1, 3, thick + 2);
    }
    if (this.#focus?.id === group.group_id && this.#focus.index === candidate.index) {
      context.strokeStyle = colours.text;
      context.lineWidth = 2;
      context.strokeRect(from - 2, y - 2, Math.max(2, to - from) + 4, thick + 4);
      context.lineWidth = 1;
    }
  }

  // --- mouse and keyboard --------------------------------------------------

  #focusUnderMouse(event) {
    const y = event.clientY - this.canvas.getBoundingClientRect().top + this.scroll.scrollTop;
    const block = this.#blocks.find((each) => y >= each.top - GAP / 2 && y < each.top + each.height + GAP / 2);
    if (!block || y - this.scroll.scrollTop < AXIS) return this.#setFocus(null);
    const index = Math.floor((y - block.top - block.inset) / this.#pitch);
    const most = block.group.candidates.length - 1;
    return this.#setFocus({ id: block.group.group_id, index: Math.min(Math.max(index, 0), most) });
  }

  #setFocus(focus) {
    if (focus?.id === this.#focus?.id && focus?.index === this.#focus?.index) return;
    this.#focus = focus;
    this.invalidate();
    if (focus) this.#showDetail(false);
  }

  #handleKey(event) {
    const place = this.#blocks.findIndex(({ group }) => group.group_id === this.#focus?.id);
    const index = this.#focus?.index ?? 0;
    const moves = {
      ArrowDown: () => this.#moveFocus(place, index + 1),
      ArrowUp: () => this.#moveFocus(place, index - 1),
      PageDown: () => this.#moveFocus(place + 1, 0),
      PageUp: () => this.#moveFocus(Math.max(place - 1, 0), 0),
      Home: () => this.#moveFocus(0, 0),
      End: () => this.#moveFocus(this.#blocks.length - 1, 0),
      Enter: () => this.#focus && this.#open(this.#focus.id),
      Escape: () => this.#setFocus(null),
    };
    if (!moves[event.key] || !this.#blocks.length) return;
    event.preventDefault();
    moves[event.key]();
  }

  // Focuses candidate `index` of block `place`, or its neighbour in the next block, and scrolls to it.
  #moveFocus(place, index) {
    const lastPlace = this.#blocks.length - 1;
    const lastIndex = (blockPlace) => this.#blocks[blockPlace].group.candidates.length - 1;
    if (place < 0) {
      place = 0; // nothing was focused
      index = 0;
    }
    place = Math.min(place, lastPlace);
    if (index < 0 && place > 0) {
      place -= 1;
      index = lastIndex(place);
    }
    if (index > lastIndex(place) && place < lastPlace) {
      place += 1;
      index = 0;
    }
    const block = this.#blocks[place];
    index = Math.min(Math.max(index, 0), lastIndex(place));
    const y = block.top + block.inset + index * this.#pitch;
    const [scrollTop, visibleHeight] = [this.scroll.scrollTop, this.scroll.clientHeight];
    if (y - LOWEST < scrollTop + AXIS) this.scroll.scrollTop = y - LOWEST - AXIS;
    if (y + LOWEST > scrollTop + visibleHeight) this.scroll.scrollTop = y + LOWEST - visibleHeight;
    this.#setFocus({ id: block.group.group_id, index });
    this.#showDetail(true);
  }

  // Describes the focused candidate, for screen readers too if `aloud`.
  #showDetail(aloud) {
    const group = this.#model.groups.get(this.#focus.id);
    const candidate = group?.candidates[this.#focus.index];
    if (!candidate) return;
    const [first, rest] = describe(group, candidate, this.#model.time);
    byId("detail").replaceChildren(element("b", {}, first), ` ${rest}`);
    if (aloud) setText("said", `${first} ${rest}`);
  }
}

// Returns the seconds between the turns of a session, with those of a tool that runs now.
function toolSeconds({ tool_seconds: past, tools = [] }, now) {
  const last = tools.at(-1);
  return last && last[1] === null ? past + Math.max(0, now - last[0]) : past;
}

// Returns the kind of a candidate, and facts about it, as two texts.
function describe(group, candidate, now) {
  const length = `${countOf(candidate.tokens, "token")}${candidate.cut ? ", cut there" : ""}`;
  const what = candidate.turns === undefined ? "candidate" : "session";
  const facts = [`${what} ${candidate.index} of ${group.started}`, length];
  if (candidate.turns !== undefined) facts.push(countOf(candidate.turns, "turn"), `${seconds(toolSeconds(candidate, now))} in tools`);
  if (candidate.start !== undefined) facts.push(`ran ${seconds((candidate.stop ?? group.ended ?? now) - candidate.start)}`);
  if (candidate.start > group.began + 0.005) facts.push(`after ${seconds(candidate.start - group.began)}`);
  if (candidate.resumed) facts.push(`went on from ${countOf(candidate.resumed, "token")} of an earlier batch`);
  if (candidate.quality !== undefined) facts.push(`quality ${candidate.quality.toFixed(2)}`);
  facts.push(`group ${group.group_id}`, `prompt ${shorten(group.prompt_key ?? "without a key", 24)}`, `policy ${group.policy}`);
  const kind = KINDS[kindOf(candidate)] ?? candidate.state;
  return [`${kind[0].toUpperCase()}${kind.slice(1)}:`, `${facts.join(" · ")}`];
}
