"use strict";
// The sections of a page beside the model: figures, plans side by side, time, memory, ranks and the points of a sweep.

function Meter({ share, mark, label }) {
  return h("div", { class: "meter", role: "img", "aria-label": label }, h("i", { style: { width: `${100 * Math.min(share, 1)}%` }, class: share > 1 ? "over" : "" }),
    mark !== null && h("b", { style: { left: `${100 * Math.min(mark, 1)}%` } }));
}

function Card({ name, value, more, children }) {
  return h("div", { class: "card" }, h("span", { class: "soft" }, name), h("strong", null, value), children, more && h("span", { class: "soft" }, more));
}

function Summary({ view }) {
  const limit = view.memory_limit_bytes;
  const claim = view.is_claim ? " From the plan's file, not verified by this run." : "";
  const bound = view.lower_bound_s
    ? `No ${view.bound_of} takes less than ${seconds(view.lower_bound_s)}; gap ${percent(view.gap)}.${claim}`
    : `No lower bound is known.${claim}`;
  return h("section", { id: "summary" },
    h("div", { class: "cards" },
      h(Card, { name: "Step", value: seconds(view.step_s), more: bound },
        view.lower_bound_s ? h(Meter, { share: 1, mark: view.lower_bound_s / view.step_s, label: `bound at ${percent(view.lower_bound_s / view.step_s)} of the step` }) : null),
      h(Card, { name: "Gap", value: view.lower_bound_s ? percent(view.gap) : "–", more: view.origin ? `Found by ${view.origin}.` : "" }),
      h(Card, { name: "Memory of a device", value: bytes(view.memory_bytes), more: limit ? `Limit ${bytes(limit)}${view.memory_bytes > limit ? ", exceeded" : ""}.` : "No limit." },
        limit ? h(Meter, { share: view.memory_bytes / limit, mark: null, label: `${percent(view.memory_bytes / limit)} of the limit` }) : null),
      h(Card, { name: "Mesh", value: view.mesh, more: `${view.schedule ? `${view.schedule}, bubble ${percent(view.bubble)}. ` : ""}${view.cluster} (${view.cluster_source}), optimizer ${view.optimizer}.` })),
    view.notes.map((note) => h("p", { class: "note", key: note }, note)));
}

function Compared({ rows, chosen, choose }) {
  if (rows.length < 2) return null;
  const most = Math.max(...rows.map((row) => row.step_s));
  return h("section", { id: "plans" }, h("h2", null, "Plans, by the same cost model"),
    h("div", { class: "scroll" }, h("table", { class: "plans" },
      h("thead", null, h("tr", null, h("th", null, "plan"), h("th", null, "step"), h("th", { class: "wide" }), h("th", null, "ratio"), h("th", null, "memory"))),
      h("tbody", null, rows.map((row) => h("tr", { key: row.name, class: row.view !== null && row.view === chosen ? "chosen" : "" },
        h("td", null, row.view === null ? h("span", { class: "only" }, row.name) : h("button", { class: "pick", "aria-pressed": row.view === chosen, onClick: () => choose(row.view) }, row.name)),
        h("td", { class: "number" }, seconds(row.step_s)), h("td", { class: "wide" }, h("i", { class: `length${row.fits ? "" : " over"}`, style: { width: `${(100 * row.step_s) / most}%` } })),
        h("td", { class: "number" }, row.ratio === null ? "–" : row.ratio.toFixed(2)), h("td", { class: "number" }, bytes(row.memory_bytes), row.fits ? "" : h("em", null, " exceeds the limit"))))))),
    h("p", { class: "soft" }, rows.some((row) => row.view === null) ? "A name that is a button shows that plan below; of the others only the costs are known." : "A name shows that plan below."));
}

function Times({ views, view }) {
  const rows = (views.includes(view) ? views : [view]).map((each) => ({ name: each.name, parts: each.terms }));
  const families = Object.entries(view.families).map(([name, s]) => ({ name, parts: { "compute forward and backward": s } }));
  return h("section", { id: "times", class: "two" },
    h("div", null, h("h2", null, "Time of a step by link level"),
      h(Chart, { id: "terms", label: "seconds of a step by term, a bar for each plan", height: 70 + 30 * rows.length, on: [view, views], option: (width) => barsOption(rows, seconds, width) }),
      view.schedule && h("p", { class: "soft" }, "In stages: of the busiest rank, and of the slowest in what is once a step.")),
    h("div", null, h("h2", null, "Compute by kind of op"),
      h(Chart, { id: "families", label: "seconds of compute by kind of op", height: 24 + 24 * families.length, on: [view], option: (width) => barsOption(families, seconds, width) }),
      view.schedule && h("p", { class: "soft" }, "All stages together.")));
}

function TimelineSection({ view, hover }) {
  const { timeline } = view;
  const chart = useRef(null);
  const height = Math.max(150, Math.min(86 + timeline.lanes.length * 26, 86 + Math.max(560, timeline.lanes.length * 7)));
  const zoom = (factor) => {
    if (!chart.current) return;
    const { start, end } = chart.current.getOption().dataZoom[0];
    const [middle, half] = [(start + end) / 2, Math.min(((end - start) / 2) * factor, 50)];
    const from = Math.min(Math.max(middle - half, 0), 100 - 2 * half);
    chart.current.dispatchAction({ type: "dataZoom", start: from, end: from + 2 * half });
  };
  const ready = (made, box) => {
    chart.current = made;
    box.dataset.drawn = "yes";
    const pointed = (event) => {
      const point = [event.offsetX, event.offsetY];
      if (!made.containPixel({ gridIndex: 0 }, point)) { hover.hide(); return; }
      const [tick, number] = made.convertFromPixel({ gridIndex: 0 }, point);
      const lane = timeline.lanes[Math.round(number)];
      const at = lane ? spanAt(lane, tick) : -1;
      if (at < 0) { hover.hide(); return; }
      const time = (ticks) => seconds(ticks * timeline.tick_s);
      hover.show(event.event, h(Lines, { title: timeline.labels[lane.labels[at]], rows: [[timeline.kinds[lane.kinds[at]], lane.name, colourOf(timeline.kinds[lane.kinds[at]])],
        ["from", time(lane.starts[at])], ["takes", time(lane.lengths[at])]] }));
    };
    const screen = made.getZr();
    screen.off("mousemove");
    screen.off("globalout");
    screen.on("mousemove", pointed);
    screen.on("globalout", hover.hide);
    made.off("datazoom");
    made.on("datazoom", () => { const { start, end } = made.getOption().dataZoom[0]; box.dataset.zoom = `${start.toFixed(1)} ${end.toFixed(1)}`; });
  };
  return h("section", { id: "timeline" },
    h("div", { class: "bar" }, h("h2", null, "Timeline of a step"),
      h("button", { id: "zoom-in", "aria-label": "Zoom in", onClick: () => zoom(0.5) }, "+"), h("button", { id: "zoom-out", "aria-label": "Zoom out", onClick: () => zoom(2) }, "−"),
      h("button", { id: "zoom-all", onClick: () => zoom(1e9) }, "All"), h("span", { class: "soft" }, "Drag to move, Ctrl and wheel to zoom, or the slider below.")),
    h("div", { class: "legend" }, timeline.kinds.map((kind) => h("span", { key: kind }, h("i", { class: "dot", style: { background: colourOf(kind) } }), kind))),
    h(Chart, { id: "lanes", label: "timeline of a step", height, on: [view], ready, option: (width) => timelineOption(timeline, width) }));
}

function MemorySection({ view }) {
  const [rank, setRank] = useState(view.fullest);
  const curve = view.curves.find((each) => each.rank === rank) || view.curves[0];
  if (!curve) return null;
  return h("section", { id: "memory" },
    h("div", { class: "bar" }, h("h2", null, "Memory of a device over the step"),
      view.curves.length > 1 && h("label", null, "rank ", h("select", { id: "rank", value: curve.rank, onChange: (event) => setRank(Number(event.target.value)) },
        view.curves.map((each) => h("option", { key: each.rank, value: each.rank }, each.rank)))),
      view.curves.length < view.ranks.length && h("span", { class: "soft" }, `${view.curves.length} of ${view.ranks.length} ranks, the fullest among them`)),
    h(Chart, { id: "curve", label: "memory by kind over the step", height: 300, on: [view, curve], option: (width) => memoryOption(curve, view.timeline, view.memory_limit_bytes, width) }),
    h("p", { class: "soft" }, "By the estimate of the search; the peak above is that of a dry run of the program, if there was one."));
}

function Ranks({ view }) {
  if (!view.schedule) return null;
  const named = (part) => view.ranks.map((rank, at) => ({ name: String(at), title: `rank ${at}, stage ${ranges(rank.stages.map(String))}`, parts: part(rank) }));
  return h("section", { id: "ranks", class: "two" },
    h("div", null, h("h2", null, "Time of the pipeline's ranks"),
      h(Chart, { id: "rank-times", label: "seconds by rank", height: 280, on: [view], option: (width) => barsOption(named((rank) => rank.seconds), seconds, width, { isTall: true, axisName: "rank" }) })),
    h("div", null, h("h2", null, "Memory of the pipeline's ranks"),
      h(Chart, { id: "rank-bytes", label: "bytes by rank", height: 280, on: [view], option: (width) => barsOption(named((rank) => rank.estimate_bytes), (x) => bytes(Math.round(x)), width, { isTall: true, axisName: "rank" }) })));
}

const MEASURES = {
  "step time": ["step_s", seconds], "samples/s": ["samples_per_s", count], "MFU": ["mfu", percent], "cost per million": ["cost_per_million", count], "memory": ["memory_bytes", bytes],
};

function sweepOption(points, measure, chosen) {
  const [field, shown] = MEASURES[measure];
  const lines = new Map();
  const isWeak = new Set(points.map((point) => point.figures.batch)).size > 1;
  points.forEach((point) => {
    if (point.figures[field] === null) return;
    const name = isWeak ? `${point.figures.cluster}, batch ${point.figures.batch}` : point.figures.cluster;
    if (!lines.has(name)) lines.set(name, []);
    lines.get(name).push(point);
  });
  const { soft } = inkOf();
  const isLog = ["samples_per_s", "step_s"].includes(field);
  return {
    color: PALETTE,
    legend: legend({}),
    grid: { left: 12, right: 24, top: 40, bottom: 34, containLabel: true },
    xAxis: axis({ type: "log", logBase: 2, name: "devices", nameLocation: "middle", nameGap: 24, axisLabel: { color: soft, fontSize: 11, formatter: String } }),
    yAxis: axis({ type: isLog ? "log" : "value", min: isLog ? undefined : 0, axisLabel: { color: soft, fontSize: 11, formatter: shown } }),
    tooltip: tooltip({ trigger: "item", formatter: (found) => element(`${found.seriesName}, ${found.value[0]} devices`, pointRows(found.data.point.figures, found.data.point)) }),
    series: [...lines].map(([name, found]) => ({ name, type: "line", symbol: "circle", lineStyle: { width: 2 },
      data: found.toSorted((one, other) => one.figures.devices - other.figures.devices).map((point) => ({ value: [point.figures.devices, point.figures[field]], point,
        symbolSize: point.view === chosen ? 15 : 9 })) })),
  };
}

const pointRows = (figures, point) => [["plan", figures.plan], ["step", seconds(figures.step_s)], ["gap", percent(point.gap)], ["samples/s", count(figures.samples_per_s)],
  ["MFU", percent(figures.mfu)], ["scaling", percent(point.scaling, 0)], ["memory", bytes(figures.memory_bytes)], ...(figures.cost_per_million === null ? [] : [["cost per million", count(figures.cost_per_million)]])];

function Sweep({ points, chosen, choose }) {
  const measures = Object.keys(MEASURES).filter((name) => points.some((point) => point.figures[MEASURES[name][0]] !== null));
  const [measure, setMeasure] = useState(measures.includes("samples/s") ? "samples/s" : measures[0]);
  const ready = (made, box) => { box.dataset.drawn = "yes"; made.off("click"); made.on("click", (event) => event.data.point && choose(event.data.point.view)); };
  const hasCost = measures.includes("cost per million");
  return h("section", { id: "sweep" },
    h("div", { class: "bar" }, h("h2", null, "Over devices"), measures.map((name) => h("button", { key: name, class: "measure", "aria-pressed": name === measure, onClick: () => setMeasure(name) }, name))),
    measures.length > 0 && h(Chart, { id: "points", label: `${measure} over devices`, height: 320, on: [measure, chosen], ready, option: () => sweepOption(points, measure, chosen) }),
    h("div", { class: "scroll" }, h("table", { class: "plans" },
      h("thead", null, h("tr", null, ["cluster", "devices", "batch", "plan", "step", "gap", "samples/s", "MFU", "scaling", "memory", ...(hasCost ? ["cost per million"] : [])].map((name) => h("th", { key: name }, name)))),
      h("tbody", null, points.map(({ figures, gap, scaling, view }, at) => h("tr", { key: at, class: view !== null && view === chosen ? "chosen" : "" },
        h("td", null, figures.cluster), h("td", { class: "number" }, figures.devices), h("td", { class: "number" }, figures.batch),
        figures.error ? h("td", { colSpan: 8, class: "failed" }, figures.error) : h(Fragment, null,
          h("td", null, view === null ? figures.plan : h("button", { class: "pick", "aria-pressed": view === chosen, onClick: () => choose(view) }, figures.plan)),
          [seconds(figures.step_s), percent(gap), count(figures.samples_per_s), percent(figures.mfu), percent(scaling, 0), bytes(figures.memory_bytes), ...(hasCost ? [count(figures.cost_per_million)] : [])].map((text, number) =>
            h("td", { class: "number", key: number }, text)))))))));
}
