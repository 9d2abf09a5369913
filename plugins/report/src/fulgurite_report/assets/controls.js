// What is shown, and the controls that choose it.

const MOST_DRAWN = 150;
let restTimer;
let screenTheme;

function buildCharts() {
  const byName = new Map();
  for (const curve of data.curves) {
    if (!byName.has(curve.chart)) byName.set(curve.chart, []);
    byName.get(curve.chart).push(curve);
  }
  const prefixes = new Map();
  for (const [name, curves] of byName) {
    const chart = new Chart(name, curves);
    charts.push(chart);
    const prefix = name.split("/")[0];
    if (!prefixes.has(prefix)) prefixes.set(prefix, []);
    prefixes.get(prefix).push(chart);
  }
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const chart = charts.find((candidate) => candidate.element === entry.target);
      chart.isVisible = entry.isIntersecting;
      if (chart.isVisible && chart.isStale) chart.draw();
      else if (chart.isVisible && chart.isReadoutStale) chart.tell();
    }
  }, { rootMargin: "400px" });
  // What a run says of itself besides its numbers, such as loads of the machine, is folded up.
  const isTelemetry = (chart) => chart.curves.every((curve) => curve.stream === "telemetry");
  const canFold = !charts.every(isTelemetry);
  for (const [prefix, members] of prefixes) {
    const heading = make("h3", "prefix");
    const button = make("button", "", `${prefix} (${members.length})`);
    button.addEventListener("click", () => toggleGroup(prefix));
    heading.append(button);
    byId("charts").append(heading, ...members.map((chart) => chart.element));
    groups.push({ prefix, members, heading, button, folds: canFold && members.every(isTelemetry) });
    for (const chart of members) observer.observe(chart.element);
  }
}

function toggleGroup(prefix) {
  const toggled = new Set(state.toggled);
  if (!toggled.delete(prefix)) toggled.add(prefix);
  change({ toggled });
}

function drawAll() {
  paintSwatches();
  for (const chart of charts) chart.refresh();
  delete root.dataset.drawn;
  clearTimeout(restTimer);
  restTimer = setTimeout(drawRest);
}

// Draws what is out of sight too, for pictures of the whole page, in short pieces. Of very many
// charts those that come last are drawn when they come into sight: each takes a megabyte.
function drawRest() {
  const end = performance.now() + 12;
  const rest = charts.filter((chart) => chart.isStale && !chart.element.hidden);
  let room = MOST_DRAWN - charts.filter((chart) => chart.plot && !chart.isStale).length;
  for (const chart of rest) {
    if (room-- <= 0) break;
    if (performance.now() > end) {
      restTimer = setTimeout(drawRest);
      return;
    }
    chart.draw();
  }
  root.dataset.drawn = "yes";
}

// On paper everything is drawn, dark on white.
function beginPrint() {
  screenTheme = root.dataset.theme;
  root.dataset.theme = "light";
  root.dataset.printing = "yes";
  paintSwatches();
  for (const chart of charts) chart.draw();
}

function endPrint() {
  delete root.dataset.printing;
  setTheme(screenTheme);
}

// ---- what is shown

function matches(text) {
  return state.query.toLowerCase().split(/\s+/).every((word) => text.toLowerCase().includes(word));
}

function filter() {
  for (const element of document.querySelectorAll("main [data-run]")) {
    element.toggleAttribute("hidden", state.hidden.has(Number(element.dataset.run)));
  }
  for (const row of document.querySelectorAll("main tbody tr")) {
    const isOfHidden = row.dataset.run && state.hidden.has(Number(row.dataset.run));
    const isSummary = row.closest("#summary") !== null;
    row.hidden = Boolean(isOfHidden || !(isSummary || matches(row.textContent)));
  }
  for (const element of document.querySelectorAll("main [data-search]")) {
    element.hidden ||= !matches(element.dataset.search);
  }
  for (const { prefix, members, heading, button, folds } of groups) {
    const matching = members.filter((chart) => matches(chart.name) && chart.shown.length);
    // What is searched for is shown wherever it is.
    const isOpen = state.query ? true : folds === state.toggled.has(prefix);
    for (const chart of members) chart.element.hidden = !isOpen || !matching.includes(chart);
    heading.hidden = !matching.length;
    button.setAttribute("aria-expanded", String(isOpen));
  }
}

// The choices are in the address, so that it leads to the same view.
function remember() {
  const choices = new URLSearchParams();
  if (state.query) choices.set("search", state.query);
  if (state.smooth) choices.set("smooth", state.smooth);
  if (state.logY) choices.set("y", "log");
  if (state.logX) choices.set("x", "log");
  if (state.time) choices.set("over", "seconds");
  if (state.hidden.size) choices.set("hide", [...state.hidden].join(","));
  for (const prefix of state.toggled) choices.append("fold", prefix);
  history.replaceState(null, "", choices.size ? `#${choices}` : location.pathname);
}

function recall() {
  if (!location.hash.includes("=")) return;
  const choices = new URLSearchParams(location.hash.slice(1));
  const weight = Number(choices.get("smooth"));
  state.query = choices.get("search") ?? "";
  state.smooth = weight >= 0 && weight < 1 ? weight : 0;
  state.logY = choices.get("y") === "log";
  state.logX = choices.get("x") === "log";
  state.time = hasTimes && choices.get("over") === "seconds";
  const hidden = (choices.get("hide") ?? "").split(",").filter(Boolean).map(Number);
  state.hidden = new Set(hidden.filter((index) => index in data.runs));
  state.toggled = new Set(choices.getAll("fold"));
}

function update() {
  byId("search").value = state.query;
  byId("smooth").value = state.smooth;
  byId("smooth-value").textContent = String(state.smooth);
  byId("log-y").checked = state.logY;
  byId("log-x").checked = state.logX;
  byId("time").checked = state.time;
  for (const box of document.querySelectorAll("[data-choice]")) {
    box.checked = !state.hidden.has(Number(box.dataset.choice));
  }
  filter();
  drawAll();
}

function change(changes) {
  Object.assign(state, changes);
  remember();
  update();
}

function toggleRun(index) {
  if (!(index in data.runs) || data.runs.length < 2) return;
  const hidden = new Set(state.hidden);
  if (!hidden.delete(index)) hidden.add(index);
  change({ hidden });
}

function showAll() {
  change({ hidden: new Set() });
}

function showNone() {
  if (data.runs.length > 1) change({ hidden: new Set(data.runs.keys()) });
}

function setTheme(theme) {
  root.dataset.theme = theme;
  drawAll();
}

function toggleHelp() {
  const help = byId("help");
  help.hidden = !help.hidden;
  byId("help-button").setAttribute("aria-expanded", String(!help.hidden));
}

// ---- tables

function sortBy(table, column, button) {
  const header = button.closest("th");
  const isDown = header.getAttribute("aria-sort") === "ascending";
  for (const other of header.parentElement.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", isDown ? "descending" : "ascending");
  const getKey = (row) => {
    const cell = row.children[column];
    return cell.dataset.sort === undefined ? cell.textContent : Number(cell.dataset.sort);
  };
  const isMissing = (key) => key === "" || Number.isNaN(key);
  const rows = [...table.tBodies[0].rows].sort((first, second) => {
    const [a, b] = [getKey(first), getKey(second)];
    if (isMissing(a) || isMissing(b)) return isMissing(a) - isMissing(b);
    const order = typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
    return isDown ? -order : order;
  });
  table.tBodies[0].append(...rows);
}

function addSorting() {
  for (const table of document.querySelectorAll("table")) {
    [...table.tHead.rows[0].children].forEach((header, column) => {
      if (!header.textContent || table.tBodies[0].rows.length < 2) return;
      const button = make("button");
      button.append(...header.childNodes);
      button.addEventListener("click", () => sortBy(table, column, button));
      header.append(button);
    });
  }
}

// ---- controls

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isTyping = event.target.matches("input[type=search], input[type=range]");
  if (event.key === "Escape" && event.target.id === "search") return change({ query: "" });
  if (isTyping) return;
  const actions = {
    "/": () => byId("search").focus(),
    a: showAll,
    n: showNone,
    l: () => change({ logY: !state.logY }),
    x: () => change({ logX: !state.logX }),
    t: () => hasTimes && change({ time: !state.time }),
    d: () => byId("theme").click(),
    "?": toggleHelp,
  };
  const action = actions[event.key] ?? (/^[1-9]$/.test(event.key) && (() => toggleRun(Number(event.key) - 1)));
  if (!action) return;
  event.preventDefault();
  action();
}

function connect() {
  let timer;
  byId("search").addEventListener("input", (event) => {
    clearTimeout(timer);
    timer = setTimeout(() => change({ query: event.target.value.trim() }), 150);
  });
  byId("smooth").addEventListener("input", (event) => change({ smooth: Number(event.target.value) }));
  byId("log-y").addEventListener("change", (event) => change({ logY: event.target.checked }));
  byId("log-x").addEventListener("change", (event) => change({ logX: event.target.checked }));
  byId("time").addEventListener("change", (event) => change({ time: event.target.checked }));
  byId("time").disabled = !hasTimes;
  byId("theme").addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));
  byId("help-button").addEventListener("click", toggleHelp);
  for (const box of document.querySelectorAll("[data-choice]")) {
    box.addEventListener("change", () => toggleRun(Number(box.dataset.choice)));
  }
  byId("all-runs")?.addEventListener("click", showAll);
  byId("no-runs")?.addEventListener("click", showNone);
  document.addEventListener("keydown", onKey);
  addEventListener("beforeprint", beginPrint);
  addEventListener("afterprint", endPrint);
}

const dark = matchMedia("(prefers-color-scheme: dark)");
root.dataset.theme = dark.matches ? "dark" : "light";
dark.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
recall();
addSorting();
buildCharts();
connect();
update();
root.dataset.ready = "yes";
