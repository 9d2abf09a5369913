// The curves of the page, and the charts that draw them. Everything that the page says is written
// as text, never as markup.

const COLOURS = 10;
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const TYPES = { "<u4": Uint32Array, "<f4": Float32Array, "<f8": Float64Array };
const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
const root = document.documentElement;
const state = {
  hidden: new Set(), toggled: new Set(), smooth: 0, logX: false, logY: false, time: false, query: "",
};
const charts = [];
const groups = [];

// ---- numbers

function decode(numbers) {
  const bytes = Uint8Array.from(atob(numbers.base64), (letter) => letter.charCodeAt(0));
  return Array.from(new TYPES[numbers.type](bytes.buffer));
}

for (const run of data.runs) {
  run.seconds = run.times && { x: decode(run.times.steps), y: decode(run.times.seconds) };
}
const hasTimes = data.runs.some((run) => run.seconds);

// The seconds that a run had lived at increasing steps, between those that are known.
function interpolate({ x, y }, steps) {
  let high = 0;
  return steps.map((step) => {
    while (high < x.length - 1 && x[high] < step) high++;
    const low = Math.max(high - 1, 0);
    if (x[high] === x[low]) return y[high];
    const share = Math.min(Math.max((step - x[low]) / (x[high] - x[low]), 0), 1);
    return y[low] + share * (y[high] - y[low]);
  });
}

// An exponential mean over the points, without the bias of its start.
function smoothed(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

function format(value) {
  if (value === null || value === undefined) return "";
  if (!Number.isFinite(value)) return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return String(Number(value.toPrecision(5)));
}

// Returns the points of a curve for the axes that are chosen: what cannot be drawn is null, a gap.
function getPoints(curve) {
  curve.x ??= decode(curve.steps);
  curve.y ??= decode(curve.values);
  const times = data.runs[curve.run].seconds;
  if (state.time && !times) return { x: [], y: [], raw: [] };
  const places = state.time ? interpolate(times, curve.x) : curve.x;
  const x = [];
  const raw = [];
  for (const [index, place] of places.entries()) {
    if ((state.logX && place <= 0) || (x.length && place <= x[x.length - 1])) continue;
    const value = curve.y[index];
    const canDraw = Number.isFinite(value) && !(state.logY && value <= 0);
    x.push(place);
    raw.push(canDraw ? value : null);
  }
  return { x, raw, y: state.smooth ? smoothed(raw, state.smooth) : raw };
}

// ---- colours

const colours = new Map();

function getColour(index) {
  const name = `--c${index % COLOURS}`;
  if (!colours.has(name)) colours.set(name, getComputedStyle(root).getPropertyValue(name).trim());
  return colours.get(name);
}

function paintSwatches() {
  colours.clear();
  for (const swatch of document.querySelectorAll("[data-color]")) {
    swatch.style.background = getColour(Number(swatch.dataset.color));
  }
}

// ---- charts

function make(tag, name, text) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
}

class Chart {
  constructor(name, curves) {
    this.name = name;
    this.curves = curves;
    this.isVisible = false;
    this.isStale = true;
    this.isReadoutStale = false;
    this.element = make("div", "chart");
    this.element.tabIndex = 0;
    this.element.setAttribute("role", "group");
    this.element.setAttribute("aria-label", `chart of ${name}`);
    const title = make("div", "title");
    title.append(make("h3", "", name));
    const enlarge = make("button", "", "⤢");
    enlarge.setAttribute("aria-label", `make the chart of ${name} larger or smaller`);
    enlarge.addEventListener("click", () => this.enlarge());
    title.append(enlarge);
    this.readout = make("div", "readout");
    this.plotElement = make("div", "plot");
    this.element.append(title, this.plotElement, this.readout);
    this.element.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.resize()).observe(this.plotElement);
  }

  get shown() {
    return this.curves.filter((curve) => !state.hidden.has(curve.run));
  }

  label(curve) {
    const parts = [];
    if (data.runs.length > 1) parts.push(data.runs[curve.run].name);
    if (curve.name !== this.name) parts.push(curve.name.slice(this.name.length));
    return parts.join(" ") || curve.name;
  }

  style(curve) {
    const isOne = data.runs.length === 1;
    const index = isOne ? this.curves.indexOf(curve) : curve.run;
    const members = this.curves.filter((other) => other.run === curve.run);
    const dash = isOne ? Math.floor(index / COLOURS) : members.indexOf(curve);
    const more = isOne ? 0 : Math.floor(index / COLOURS);
    return { stroke: getColour(index), dash: DASHES[(dash + more) % DASHES.length] };
  }

  // Draws again what is in sight; `drawRest` does the others when there is time.
  refresh() {
    this.isStale = true;
    if (this.isVisible) this.draw();
  }

  draw() {
    this.isStale = this.element.hidden;
    if (this.isStale) return;
    this.plot?.destroy();
    this.plot = null;
    const shown = this.shown;
    const tables = [];
    const series = [{}];
    this.series = [];
    for (const curve of shown) {
      const { x, y, raw } = getPoints(curve);
      const style = { ...this.style(curve), spanGaps: false, points: { show: x.length < 40, size: 4 } };
      const isSmooth = state.smooth > 0;
      if (isSmooth) {
        tables.push([x, raw]);
        series.push({ ...style, width: 1, alpha: 0.25, points: { show: false } });
      }
      tables.push([x, y]);
      series.push({ ...style, width: 1.6 });
      this.series.push({ curve, index: series.length - 1, rawIndex: series.length - (isSmooth ? 2 : 1) });
    }
    if (!tables.some(([, values]) => values.some((value) => value !== null))) {
      this.readout.textContent = this.explainEmpty();
      return;
    }
    const text = getComputedStyle(root).getPropertyValue("--quiet").trim();
    const line = getComputedStyle(root).getPropertyValue("--line").trim();
    const axis = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
    const options = {
      ...this.size(),
      legend: { show: false },
      padding: [8, 28, 0, 0],
      cursor: { sync: { key: "charts" }, drag: { x: true, y: false }, points: { size: 6 } },
      scales: {
        x: { time: false, distr: state.logX ? 3 : 1 },
        y: { distr: state.logY ? 3 : 1 },
      },
      axes: [
        { ...axis, label: state.time ? "seconds" : undefined, labelSize: 16, size: 30 },
        { ...axis, size: 58, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : format(tick))) },
      ],
      series,
      hooks: { setCursor: [() => this.tell()] },
    };
    this.plot = new uPlot(options, uPlot.join(tables), this.plotElement);
    this.tell();
  }

  explainEmpty() {
    if (!this.shown.length) return "no run is selected";
    if (state.time && this.shown.every((curve) => !data.runs[curve.run].seconds)) {
      return "the times of these values are not known";
    }
    return state.logX || state.logY ? "nothing above 0 for a logarithmic axis" : "no finite value";
  }

  size() {
    const height = this.element.classList.contains("large") ? 420 : 200;
    // On paper there are two columns, of which the window knows nothing.
    const width = root.dataset.printing ? 320 : Math.max(this.plotElement.clientWidth, 100);
    return { width, height };
  }

  resize() {
    if (root.dataset.printing) return;
    if (this.plot && this.plot.width !== this.plotElement.clientWidth) this.plot.setSize(this.size());
  }

  enlarge() {
    this.element.classList.toggle("large");
    this.draw();
  }

  // Writes the values at the cursor, or the newest ones, below the chart.
  tell() {
    const { plot } = this;
    // The cursor of one chart moves those of all.
    this.isReadoutStale = !this.isVisible;
    if (!plot || (this.isReadoutStale && plot.cursor.idx !== null)) return;
    const cursor = plot.cursor.idx;
    const xs = plot.data[0];
    const last = cursor ?? xs.length - 1;
    const place = make("b", "", `${state.time ? "second" : "step"} ${format(xs[last] ?? 0)}`);
    this.readout.replaceChildren(place);
    const rows = this.series.map(({ curve, index, rawIndex }) => {
      let at = last;
      while (at > 0 && plot.data[index][at] === undefined) at--;
      return { curve, value: plot.data[index][at], raw: plot.data[rawIndex][at], x: xs[at] };
    });
    rows.sort((a, b) => (b.value ?? -Infinity) - (a.value ?? -Infinity));
    for (const { curve, value, raw, x } of rows) {
      const entry = make("span");
      const swatch = make("span", "swatch");
      swatch.style.background = this.style(curve).stroke;
      let text = `${this.label(curve)} ${value === null ? "cannot be drawn" : format(value)}`;
      if (raw !== value && raw !== null) text += ` (${format(raw)})`;
      if (value !== undefined && x !== xs[last]) text += ` at ${format(x)}`;
      entry.append(swatch, text);
      this.readout.append(entry);
    }
  }

  // The keys that move and zoom, while the chart has the focus.
  onKey(event) {
    const { plot } = this;
    if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const xs = plot.data[0];
    const { min, max } = plot.scales.x;
    const at = plot.cursor.idx ?? xs.length - 1;
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (event.key in moves) {
      const next = Math.min(Math.max(at + moves[event.key], 0), xs.length - 1);
      plot.setCursor({ left: plot.valToPos(xs[next], "x"), top: plot.over.clientHeight / 2 });
    } else if (event.key === "+" || event.key === "=" || event.key === "-") {
      const factor = event.key === "-" ? 2 : 0.5;
      const low = xs[at] - (xs[at] - min) * factor;
      const high = xs[at] + (max - xs[at]) * factor;
      plot.setScale("x", { min: Math.max(low, xs[0]), max: Math.min(high, xs[xs.length - 1]) });
    } else if (event.key === "0" || event.key === "Escape") {
      plot.setScale("x", { min: xs[0], max: xs[xs.length - 1] });
    } else if (event.key === "Enter" && event.target === this.element) {
      this.enlarge();
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }
}
