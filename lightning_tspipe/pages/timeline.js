// Draws the timelines of a page, each figure.viewer with its data in a JSON script.
//
// A span is [rank, start, duration, action, step, batch, read], a wait
// [rank, start, duration, cause, awaited span or -1]; times are milliseconds.
"use strict";

(() => {
  const ROW = 30, BAR = 23, AXIS = 24, FONT = "12px system-ui, 'DejaVu Sans', sans-serif";
  const LEAST = 1e-3; // milliseconds across the whole width
  const RANK = 0, START = 1, LENGTH = 2, ACTION = 3, STEP = 4, BATCH = 5, READ = 6;
  const CAUSE = 3, AWAITED = 4;

  const element = (name, parent, properties = {}) =>
    parent.appendChild(Object.assign(document.createElement(name), properties));

  const milliseconds = (value) => {
    const size = Math.abs(value);
    return `${value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3)} ms`;
  };

  /** The index of the first item that ends behind a time; items of one rank follow each other. */
  const firstBehind = (items, time) => {
    let low = 0, high = items.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (items[middle][START] + items[middle][LENGTH] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  };

  const byRank = (items, number) => {
    const rows = Array.from({ length: number }, () => []);
    for (const item of items) rows[item[RANK]].push(item);
    for (const row of rows) row.sort((one, other) => one[START] - other[START]);
    return rows;
  };

  /** The longest of some texts that fits into a width; "" if none does. */
  const fitting = (context, texts, width) =>
    texts.find((text) => text && context.measureText(text).width < width - 6) ?? "";

  /** Stripes for a rank that waits for another one. */
  const stripes = (context) => {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 7;
    const brush = tile.getContext("2d");
    brush.fillStyle = "#fbf1ee";
    brush.fillRect(0, 0, 7, 7);
    brush.strokeStyle = "#d9bdb6";
    for (const shift of [-7, 0, 7]) {
      brush.beginPath();
      brush.moveTo(shift - 1, 8);
      brush.lineTo(shift + 8, -1);
      brush.stroke();
    }
    return context.createPattern(tile, "repeat");
  };

  /** One timeline: its canvas, what is on it, and what lies under a point of it. */
  class Drawing {
    constructor(data, parent) {
      this.data = data;
      this.number = data.busy.length;
      this.spans = byRank(data.spans, this.number);
      this.waits = byRank(data.waits, this.number);
      const title = element("h3", parent, { textContent: `${data.name}: ` });
      element("small", title, { textContent: data.summary });
      const rows = element("div", parent, { className: "rows" });
      const ranks = element("ol", rows, { className: "ranks" });
      data.busy.forEach((share, rank) => {
        const item = element("li", ranks, { textContent: `rank ${rank}` });
        element("small", item, { textContent: `busy ${(100 * share).toFixed(0)} %` });
      });
      this.canvas = element("canvas", rows);
      this.canvas.setAttribute("role", "img");
      this.canvas.setAttribute("aria-label", `${data.name}: ${data.summary}`);
      this.context = this.canvas.getContext("2d");
      this.pattern = stripes(this.context);
    }

    /** Fit the canvas to the page. */
    resize() {
      const ratio = window.devicePixelRatio || 1;
      this.width = this.canvas.clientWidth;
      this.height = this.number * ROW + AXIS;
      this.canvas.style.height = `${this.height}px`;
      this.canvas.width = Math.round(this.width * ratio);
      this.canvas.height = Math.round(this.height * ratio);
      this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    }

    /** Draw the times between two moments, with the frame of what is pointed at. */
    draw(from, to, pointed) {
      const context = this.context, scale = this.width / (to - from);
      const x = (time) => (time - from) * scale;
      context.clearRect(0, 0, this.width, this.height);
      context.font = FONT;
      context.textBaseline = "middle";
      context.textAlign = "center";
      for (let rank = 0; rank < this.number; rank++) {
        const top = rank * ROW;
        const [first, last] = this.data.steady[rank];
        context.fillStyle = "#f7f8fa";
        context.fillRect(x(first), top, (last - first) * scale, ROW - 3);
        for (const item of this.visible(this.waits[rank], from, to)) {
          const awaited = this.data.spans[item[AWAITED]];
          this.bar(x, scale, item, awaited ? this.pattern : "#e8ebef", 1, "#7a3b2e", () => awaited
            ? [`waits ${milliseconds(item[LENGTH])} for rank ${awaited[RANK]}`,
               `for rank ${awaited[RANK]}`]
            : [item[CAUSE]]);
        }
        for (const item of this.visible(this.spans[rank], from, to)) {
          const action = this.data.actions[item[ACTION]];
          const ink = action.opacity < 1 || action.colour === "#F0E442" ? "#1d2733" : "#fff";
          const read = item[READ] && `${item[BATCH]} ${item[READ]}`;
          this.bar(x, scale, item, action.colour, action.opacity, ink, () => [
            `${action.name} ${action.text}`, read, action.text, `${action.unit ?? ""}`]);
        }
      }
      this.axis(from, to, x);
      if (pointed && pointed.drawing === this) this.frame(pointed, x, scale);
    }

    *visible(items, from, to) {
      for (let at = firstBehind(items, from); at < items.length && items[at][START] < to; at++)
        yield items[at];
    }

    bar(x, scale, item, fill, opacity, ink, texts) {
      // What lies outside is cut off, so that the text stands in the middle of what is seen.
      const left = Math.max(x(item[START]), 0);
      const right = Math.min(x(item[START] + item[LENGTH]), this.width);
      const top = item[RANK] * ROW + 2, width = Math.max(right - left, 0.6);
      if (!item[LENGTH]) return;
      const context = this.context;
      context.globalAlpha = opacity;
      context.fillStyle = fill;
      // A gap between two bars, once there is room for one.
      context.fillRect(left, top, width > 3 ? width - 0.8 : width, BAR);
      context.globalAlpha = 1;
      if (width < 12) return;
      context.fillStyle = ink;
      context.fillText(fitting(context, texts(), width), (left + right) / 2, top + BAR / 2 + 0.5);
    }

    axis(from, to, x) {
      const context = this.context, top = this.number * ROW;
      const rough = (to - from) / Math.max(2, this.width / 110), power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].find((each) => each * power >= rough) * power;
      const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
      context.strokeStyle = "#d9dee4";
      context.fillStyle = "#5b6775";
      for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) {
        context.beginPath();
        context.moveTo(x(tick), 0);
        context.lineTo(x(tick), top + 4);
        context.globalAlpha = 0.5;
        context.stroke();
        context.globalAlpha = 1;
        const text = `${(Math.abs(tick) < step / 2 ? 0 : tick).toFixed(decimals)} ms`;
        const half = context.measureText(text).width / 2;
        context.fillText(text, Math.min(Math.max(x(tick), half), this.width - half), top + 14);
      }
    }

    /** Outline what is pointed at; of a wait also what is awaited, with an arrow from there. */
    frame({ item, isWait }, x, scale) {
      const context = this.context;
      context.strokeStyle = "#1d2733";
      context.lineWidth = 1.6;
      const outline = (each) => context.strokeRect(
        x(each[START]), each[RANK] * ROW + 2, Math.max(each[LENGTH] * scale, 2), BAR);
      outline(item);
      const awaited = isWait && this.data.spans[item[AWAITED]];
      if (awaited) {
        outline(awaited);
        const down = awaited[RANK] < item[RANK] ? 1 : -1, middle = 2 + BAR / 2;
        const startX = x(awaited[START] + awaited[LENGTH]), endX = x(item[START] + item[LENGTH]);
        const startY = awaited[RANK] * ROW + middle + (down * BAR) / 2;
        const endY = item[RANK] * ROW + middle - (down * BAR) / 2;
        context.beginPath();
        context.moveTo(startX, startY);
        context.lineTo(endX, endY);
        context.moveTo(endX - 4, endY - 6 * down);
        context.lineTo(endX, endY);
        context.lineTo(endX + 4, endY - 6 * down);
        context.stroke();
      }
      context.lineWidth = 1;
    }

    /** The action or the wait at a point, a few pixels off at most; null if there is none. */
    at(pixelX, pixelY, from, to) {
      const rank = Math.floor(pixelY / ROW), time = from + (pixelX / this.width) * (to - from);
      const slack = (3 / this.width) * (to - from);
      if (rank < 0 || rank >= this.number) return null;
      for (const within of [0, slack])
        for (const isWait of [false, true]) {
          const items = (isWait ? this.waits : this.spans)[rank];
          const item = items[firstBehind(items, time - within)];
          if (item && item[LENGTH] && item[START] <= time + within) return { drawing: this, item, isWait };
        }
      return null;
    }

    /** A title and lines about something that is pointed at. */
    describe({ item, isWait }) {
      const start = `starts at ${milliseconds(item[START])}`;
      if (isWait) {
        const awaited = this.data.spans[item[AWAITED]];
        if (!awaited)
          return [`rank ${item[RANK]} is idle for ${milliseconds(item[LENGTH])}: ${item[CAUSE]}`,
            `It waits ${this.data.causes[item[CAUSE]]}.`, start];
        const action = this.data.actions[awaited[ACTION]];
        return [`rank ${item[RANK]} waits ${milliseconds(item[LENGTH])} for rank ${awaited[RANK]}`,
          `until ${action.text} has ended there: ${action.name}, ${action.place}, `
          + `batch ${awaited[BATCH]}`, start];
      }
      const action = this.data.actions[item[ACTION]];
      return [`${action.name} ${action.text}: ${milliseconds(item[LENGTH])}`,
        `rank ${item[RANK]}`
        + (action.place.startsWith("rank") ? "" : `, ${action.place}`)
        + (action.unit === null ? "" : `, unit ${action.unit}`),
        `batch ${item[BATCH]}, run in step ${item[STEP]}`,
        item[READ] && `reads weights ${item[READ]}`, start];
    }
  }

  /** One figure: several drawings with the same axis. */
  const view = (root) => {
    const data = JSON.parse(root.querySelector("script").textContent);
    const tools = element("div", root, { className: "tools" });
    const drawings = data.timelines.map((each) => new Drawing(each, root));
    for (const behind of root.querySelectorAll(":scope > .legend, :scope > figcaption"))
      root.appendChild(behind);
    const tip = element("div", root, { className: "tip", hidden: true });
    tip.setAttribute("role", "status");
    const margin = (data.range[1] - data.range[0]) * 0.005;
    const whole = [data.range[0] - margin, data.range[1] + margin];
    let [from, to] = whole, pointed = null, awaiting = false;

    const draw = () => {
      awaiting = false;
      for (const drawing of drawings) drawing.draw(from, to, pointed);
      shown.textContent = `${milliseconds(from)} to ${milliseconds(to)}`;
      root.dataset.from = from;
      root.dataset.to = to;
    };
    const redraw = () => {
      if (!awaiting) requestAnimationFrame(draw);
      awaiting = true;
    };
    const show = (first, last) => {
      const length = Math.min(Math.max(last - first, LEAST), whole[1] - whole[0]);
      from = Math.min(Math.max(first, whole[0]), whole[1] - length);
      to = from + length;
      redraw();
    };
    const zoom = (factor, at = (from + to) / 2) => {
      const length = Math.max((to - from) * factor, LEAST);
      const first = at - ((at - from) / (to - from)) * length;
      show(first, first + length);
    };
    const move = (share) => show(from + share * (to - from), to + share * (to - from));
    const reset = () => show(...whole);
    const point = (found, event) => {
      pointed = found;
      tip.hidden = !found;
      if (found) {
        const [title, ...lines] = found.drawing.describe(found);
        tip.replaceChildren();
        element("b", tip, { textContent: title });
        tip.append(lines.filter(Boolean).join("\n"));
        const { width, height } = tip.getBoundingClientRect();
        const right = event.clientX + 14 + width > innerWidth;
        const below = event.clientY + 16 + height > innerHeight;
        tip.style.left = `${Math.max(4, right ? event.clientX - 14 - width : event.clientX + 14)}px`;
        tip.style.top = `${below ? event.clientY - 12 - height : event.clientY + 16}px`;
      }
      redraw();
    };

    for (const [text, title, act] of [
      ["+", "zoom in", () => zoom(1 / 1.5)], ["−", "zoom out", () => zoom(1.5)],
      ["‹", "earlier", () => move(-0.3)], ["›", "later", () => move(0.3)],
      ["everything", "show everything", reset],
    ]) element("button", tools, { type: "button", textContent: text, title, onclick: act });
    const shown = element("span", tools, { className: "shown" });

    for (const drawing of drawings) {
      const canvas = drawing.canvas;
      let dragged = null;
      const here = (event) => {
        const box = canvas.getBoundingClientRect();
        return [event.clientX - box.left, event.clientY - box.top];
      };
      const zooms = (event) => root.dataset.wheel === "always" || event.ctrlKey
        || root.contains(document.activeElement);
      canvas.addEventListener("wheel", (event) => {
        if (!zooms(event)) return;
        event.preventDefault();
        const turn = event.deltaMode === 1 ? 30 : 1;
        if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))
          move(((event.deltaX || event.deltaY) * turn) / drawing.width);
        else
          zoom(Math.exp(event.deltaY * turn * 0.0015), from + (here(event)[0] / drawing.width) * (to - from));
        point(null, event);
      }, { passive: false });
      canvas.addEventListener("pointerdown", (event) => {
        if (event.button) return;
        canvas.setPointerCapture(event.pointerId);
        canvas.classList.add("dragged");
        dragged = { x: event.clientX, from, to };
        point(null, event);
      });
      canvas.addEventListener("pointermove", (event) => {
        if (dragged) {
          const shift = ((dragged.x - event.clientX) / drawing.width) * (dragged.to - dragged.from);
          show(dragged.from + shift, dragged.to + shift);
        } else point(drawing.at(...here(event), from, to), event);
      });
      const release = () => {
        dragged = null;
        canvas.classList.remove("dragged");
      };
      canvas.addEventListener("pointerup", release);
      canvas.addEventListener("pointercancel", release);
      canvas.addEventListener("pointerleave", (event) => point(null, event));
      canvas.addEventListener("dblclick", reset);
    }
    root.addEventListener("keydown", (event) => {
      const keys = {
        "+": () => zoom(1 / 1.5), "=": () => zoom(1 / 1.5), "-": () => zoom(1.5),
        ArrowLeft: () => move(-0.1), ArrowRight: () => move(0.1), 0: reset,
      };
      if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      keys[event.key]();
    });
    const resize = () => {
      for (const drawing of drawings) drawing.resize();
      draw();
    };
    addEventListener("resize", resize);
    resize();
  };

  for (const root of document.querySelectorAll("figure.viewer")) view(root);
})();
