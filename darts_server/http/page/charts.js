// Lengths, tokens, ends and numbers of candidates of the groups that are kept.
const BINS = 44;

class Charts {
  #model;
  #version = -1;

  constructor(model) {
    this.#model = model;
    for (const kind of ENDS) {
      const mark = element("i", { class: kind });
      mark.style.background = `var(--${kind})`;
      byId("ends").append(element("li", { id: `end-${kind}` }, mark, KINDS[kind], element("b", {}, "0")));
    }
    new ResizeObserver(() => this.invalidate()).observe(byId("overview"));
  }

  // Requests a new drawing in the next frame.
  invalidate() {
    this.#version = -1;
  }

  // Draws if the model has changed and the tab is visible.
  drawIfChanged() {
    if (this.#version === this.#model.version || byId("overview").clientWidth === 0) return;
    this.#version = this.#model.version;
    const groups = this.#model.newest.filter((group) => group.ended !== undefined);
    const sum = sumUp(groups);
    document.querySelector(".of-shown").textContent = `of the last ${countOf(groups.length, "group")}`;
    this.#lengths(sum);
    this.#tokens(sum);
    for (const kind of ENDS) {
      const row = byId(`end-${kind}`);
      row.lastChild.textContent = count(sum.ends[kind]);
      row.classList.toggle("none", sum.ends[kind] === 0);
    }
    const started = groups.map((group) => group.started);
    const [least, greatest] = [Math.min(...started), Math.max(...started)];
    const range = least === greatest ? `${least} candidates each` : `${least} to ${greatest} candidates, mean ${mean(started).toFixed(1)}`;
    setText("allocation-said", groups.length ? `${countOf(groups.length, "group")}: ${range}.` : "No group has ended yet.");
  }

  // Draws the histogram of generated lengths, with returned lengths in front.
  #lengths({ generated, returned, cut }) {
    const canvas = byId("lengths");
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    const context = prepareCanvas(canvas, width, height);
    const { step, found } = ticks(0, generated.reduce((most, each) => Math.max(most, each), BINS), BINS);
    const bins = Math.max(found.length, 1);
    const [all, kept] = [generated, returned].map((lengths) => {
      const counts = new Array(bins).fill(0);
      for (const length of lengths) counts[Math.min(Math.floor(length / step), bins - 1)] += 1;
      return counts;
    });
    const [left, top, bottom] = [34, 16, height - 16];
    const most = Math.max(...all, 1);
    const wide = (width - left - 2) / bins;
    context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    context.strokeStyle = colours.line;
    context.fillStyle = colours.muted;
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.beginPath();
    for (const value of [0, most]) {
      const y = Math.round(bottom - (value / most) * (bottom - top)) + 0.5;
      context.moveTo(left, y);
      context.lineTo(width, y);
      context.fillText(count(value), left - 5, Math.min(y, bottom - 4));
    }
    context.stroke();
    for (let bin = 0; bin < bins; bin += 1) {
      const x = left + bin * wide;
      for (const [counts, colour] of [[all, colours.generated], [kept, colours.short]]) {
        const high = (counts[bin] / most) * (bottom - top);
        context.fillStyle = colour;
        const inset = counts === kept ? wide * 0.22 : 0.5;
        context.fillRect(x + inset, bottom - high, Math.max(1, wide - 2 * inset), high);
      }
    }
    context.fillStyle = colours.muted;
    context.textBaseline = "top";
    for (const length of ticks(0, bins * step, 6).found) {
      const x = left + (length / step) * wide;
      context.textAlign = x > width - 20 ? "right" : "center";
      context.fillText(count(length), Math.min(x, width - 1), bottom + 3);
    }
    context.textBaseline = "middle";
    context.textAlign = "right";
    let x = width - 2;
    for (const [name, colour] of [["returned", colours.short], ["generated", colours.generated]]) {
      context.fillStyle = colours.muted;
      context.fillText(name, x, 6);
      x -= context.measureText(name).width + 13;
      context.fillStyle = colour;
      context.fillRect(x, 2, 9, 8);
      x -= 9;
    }
    const means = `${count(mean(generated))} generated, stopped ones too; ${count(mean(returned))} returned`;
    setText("lengths-said", generated.length ? `Mean ${means}. ${count(cut)} cut.` : "No group has ended yet.");
  }

  // Shows the share of returned tokens as a bar and as text.
  #tokens({ generated, returned }) {
    const [all, kept] = [total(generated), total(returned)];
    const edge = `${all ? (100 * kept) / all : 0}%`;
    const bar = `linear-gradient(to right, var(--short) ${edge}, var(--longer_than_needed) ${edge})`;
    byId("tokens").style.background = all ? bar : "";
    const share = all ? ` (${percent((all - kept) / all)})` : "";
    setText("tokens-said", `${count(all)} generated, ${count(kept)} returned, ${count(all - kept)} wasted${share}.`);
  }
}
