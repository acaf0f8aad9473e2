"use strict";
// One state: the machine. Every element with data-machine is shown if the filter is empty or names it.
(() => {
  const history = JSON.parse(document.getElementById("history-data").textContent);
  const config = { displayModeBar: false, responsive: true };
  const machineSelect = document.getElementById("machine");
  const headlines = JSON.parse(document.getElementById("headlines")?.textContent ?? "{}");
  // Plotly reads tags and entities in each text that it draws: a text of a row is none of them.
  const plain = (text) => text.replace(/[&<>]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[sign]);
  const shows = (machine) => !machineSelect.value || !machine || machine === machineSelect.value;

  function element(tag, text, parent) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  // ---- history ----
  const benchmarkSelect = document.getElementById("benchmark");
  const caseSelect = document.getElementById("case");
  const chart = document.getElementById("history-chart");
  const runs = document.getElementById("history-runs");
  const marks = history.marks;
  const url = (commit) => Object.hasOwn(history.pages, commit) ? history.pages[commit] : (history.repository && /^[0-9a-f]{7,40}$/.test(commit) ? `${history.repository}/commit/${commit}` : "");

  function commitLink(commit, parent) {
    const short = commit ? commit.slice(0, 7) : "no commit";
    if (!url(commit)) return element("span", short, parent);
    const link = element("a", short, parent);
    link.href = url(commit);
    return link;
  }

  function fill(select, values, chosen) {
    select.replaceChildren(...values.map((value) => {
      const option = element("option", value || "–");
      option.value = value;
      return option;
    }));
    if (values.includes(chosen)) select.value = chosen;
  }

  const unique = (values) => [...new Set(values)];
  const available = () => history.series.filter((series) => shows(series.machine));

  function fillBenchmarks() {
    if (!history.series.length) return;
    fill(benchmarkSelect, unique(available().map((series) => series.name)), benchmarkSelect.value);
    fillCases();
  }

  function fillCases() {
    const found = available().filter((series) => series.name === benchmarkSelect.value);
    fill(caseSelect, unique(found.map((series) => series.case)), caseSelect.value);
    caseSelect.parentElement.hidden = caseSelect.options.length === 1 && !caseSelect.value;
    drawHistory();
  }

  const seconds = { ns: 1e-9, us: 1e-6, ms: 1e-3, s: 1 };
  const scaleOf = (unit) => (Object.hasOwn(seconds, unit) ? seconds[unit] : 1);

  function drawHistory() {
    const chosen = available().filter(
      (series) => series.name === benchmarkSelect.value && series.case === caseSelect.value);
    const traces = [], shapes = [], annotations = [];
    for (const series of chosen) {
      const mark = marks[history.machines.indexOf(series.machine) % marks.length] || marks[0];
      const scale = scaleOf(series.unit);
      const times = series.time.map((t) => new Date(t * 1000));
      const scaled = (values) => values.map((value, i) => Math.abs((value ?? series.value[i]) - series.value[i]) * scale);
      traces.push({
        type: "scatter", mode: "lines+markers", name: plain(series.machine) || "any machine",
        meta: series.machine, x: times, y: series.value.map((value) => value * scale),
        error_y: { type: "data", array: scaled(series.high), arrayminus: scaled(series.low), color: mark.colour,
          thickness: 1.2, width: 3 },
        line: { color: mark.colour, width: 1, dash: mark.dash },
        marker: { color: mark.colour, size: 8,
          symbol: series.dirty.map((dirty) => mark.symbol + (dirty ? "-open" : "")) },
        customdata: series.commit.map((c, i) =>
          [plain(history.commits[c].slice(0, 7)) || "no commit", series.dirty[i] ? " + changes" : "", series.n[i],
            history.commits[c]]),
        hovertemplate: "%{y:.4~s}<br>%{x|%Y-%m-%d %H:%M}, %{customdata[0]}%{customdata[1]}, n = %{customdata[2]}<extra></extra>",
      });
      for (const level of series.levels) {
        shapes.push({ type: "line", x0: new Date(level.from * 1000), x1: new Date(level.to * 1000),
          y0: level.value * scale, y1: level.value * scale, line: { color: mark.colour, width: 4 }, opacity: 0.35 });
      }
      series.steps.forEach((step, i) => {
        const at = new Date(step.time * 1000);
        shapes.push({ type: "line", x0: at, x1: at, yref: "paper", y0: 0, y1: 1,
          line: { color: mark.colour, width: 1.5, dash: "dot" } });
        // Two lines in turn: neighbours are far apart in neither.
        annotations.push({ x: at, yref: "paper", y: 1, yanchor: "bottom", yshift: 15 * (i % 2), showarrow: false,
          text: `${step.text} ${step.word}` });
      });
    }
    const grey = "#7d848d", grid = "rgba(125,132,141,.25)";
    const unit = chosen.length ? chosen[0].unit : "";
    const axis = { fixedrange: true, gridcolor: grid, linecolor: grey, showline: true, zeroline: false };
    Plotly.react(chart, traces, {
      height: 340, margin: { l: 64, r: 16, t: annotations.length ? 42 : 10, b: 46 }, paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)", font: { family: "system-ui, sans-serif", size: 13, color: grey },
      showlegend: traces.length > 1, legend: { orientation: "h", y: -0.22 }, dragmode: false, hovermode: "closest",
      shapes, annotations, xaxis: { ...axis, type: "date", nticks: 5, tickangle: 0 },
      yaxis: { ...axis, title: { text: plain(chosen.length ? chosen[0].axis : ""), font: { size: 13 } }, tickformat: unit === "share" ? ".1%" : "~s" },
    }, config);
    listRuns(chosen);
  }

  // The newest runs as text: the chart's figures for those who cannot hover, and links to their commits.
  function listRuns(chosen) {
    const points = chosen.flatMap((series) => series.time.map((time, i) => ({ series, time, i })));
    points.sort((a, b) => b.time - a.time);
    runs.replaceChildren(...points.slice(0, 10).map(({ series, time, i }) => {
      const row = element("tr");
      element("th", new Date(time * 1000).toISOString().slice(0, 16).replace("T", " "), row).scope = "row";
      commitLink(history.commits[series.commit[i]], element("td", undefined, row));
      if (series.dirty[i]) row.lastChild.append(" + changes");
      element("td", figure(series.value[i], series.unit), row);
      const ends = [series.low[i], series.high[i]];
      const interval = ends.includes(null) ? "–" : ends.map((end) => figure(end, series.unit)).join(" to ");
      element("td", interval, row);
      element("td", series.n[i].toLocaleString("en"), row);
      element("span", series.machine || "any", element("td", undefined, row)).className = "name-of";
      return row;
    }));
  }

  function figure(value, unit) {
    let scaled = value, name = unit === "time ratio" ? "×" : unit;
    if (Object.hasOwn(seconds, unit)) {
      const size = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
      const [factor, short] = size.find(([factor]) => Math.abs(value * seconds[unit]) >= factor) || size[3];
      [scaled, name] = [(value * seconds[unit]) / factor, short];
    }
    const small = scaled !== 0 && Math.abs(scaled) < 1e-4;
    const text = small ? scaled.toExponential(2) : scaled.toLocaleString("en", { maximumSignificantDigits: 4 });
    return name === "×" ? text + name : name ? `${text} ${name}` : text;
  }

  for (const button of document.querySelectorAll("button[data-series]")) {
    button.addEventListener("click", () => {
      choose(history.series[Number(button.dataset.series)]);
      chart.scrollIntoView({ block: "center" });
    });
  }

  // ---- filters ----
  function applyMachine() {
    for (const block of document.querySelectorAll("[data-machine]")) block.hidden = !shows(block.dataset.machine);
    const headline = headlines[machineSelect.value];
    if (headline) {
      const title = document.querySelector("#verdict h2"), age = document.querySelector("#verdict .age");
      title.textContent = headline.finding;
      title.className = headline.word;
      age.textContent = headline.age;
      age.className = `age ${headline.word}`;
    }
    fillBenchmarks();
  }

  function choose(series) {
    benchmarkSelect.value = series.name;
    fillCases();
    caseSelect.value = series.case;
    drawHistory();
  }

  machineSelect.addEventListener("change", applyMachine);
  applyMachine();
  if (history.series.length) {
    benchmarkSelect.addEventListener("change", fillCases);
    caseSelect.addEventListener("change", drawHistory);
    const first = history.series[history.start];
    if (shows(first.machine)) choose(first);
    chart.on("plotly_click", ({ points: [point] }) => {
      const target = url(point.customdata[3]);
      if (target) window.open(target, "_blank", "noopener");
    });
  }
  document.documentElement.dataset.ready = "true";
})();
