"use strict";
// Charts: a component that draws an option of ECharts, and the options of each chart.

const MEDIA = window.matchMedia("(prefers-color-scheme: dark)");

function useTheme() {
  const [isDark, setDark] = useState(MEDIA.matches);
  useEffect(() => {
    const changed = () => setDark(MEDIA.matches);
    MEDIA.addEventListener("change", changed);
    return () => MEDIA.removeEventListener("change", changed);
  }, []);
  return isDark;
}

// `option`: a function, called when the chart comes into view, and again when one of `on` or the theme changes.
function Chart({ option, height, on, label, id, ready }) {
  const box = useRef(null);
  const chart = useRef(null);
  const [isSeen, setSeen] = useState(false);
  const isDark = useTheme();
  useEffect(() => {
    const watch = new IntersectionObserver((seen) => seen.some((each) => each.isIntersecting) && setSeen(true), {
      rootMargin: "200px",
    });
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  useEffect(() => {
    if (!isSeen) return undefined;
    chart.current = echarts.init(box.current, null, { renderer: "canvas" });
    const resized = new ResizeObserver(() => chart.current.resize());
    resized.observe(box.current);
    return () => {
      resized.disconnect();
      chart.current.dispose();
      chart.current = null;
    };
  }, [isSeen]);
  useEffect(() => {
    if (!chart.current) return;
    chart.current.resize();
    chart.current.setOption({ animation: false, textStyle: { fontFamily: getComputedStyle(document.body).fontFamily }, ...option(box.current.clientWidth) }, true);
    if (ready) ready(chart.current, box.current);
  }, [isSeen, isDark, height, ...on]);
  return h("div", { ref: box, id, class: "chart", style: { height: `${height}px` }, role: "img", "aria-label": label });
}

const inkOf = () => ({ ink: cssOf("--ink"), soft: cssOf("--soft"), line: cssOf("--line"), card: cssOf("--card") });

function axis(more) {
  const { soft, line } = inkOf();
  return {
    axisLabel: { color: soft, fontSize: 11, hideOverlap: true },
    axisLine: { lineStyle: { color: line } },
    axisTick: { lineStyle: { color: line } },
    splitLine: { lineStyle: { color: line, opacity: 0.6 } },
    nameTextStyle: { color: soft },
    ...more,
  };
}

const legend = (more) => ({ type: "plain", icon: "roundRect", top: 0, left: 0, itemWidth: 11, itemHeight: 11, itemGap: 12, textStyle: { color: inkOf().soft, fontSize: 11.5 }, ...more });

// The height of a legend that is as wide as the chart.
const legendHeight = (names, width) => 22 * Math.ceil(names.reduce((sum, name) => sum + 7 * name.length + 32, 0) / Math.max(width, 1)) + 12;

// A tooltip's lines as an element: ECharts would take a text for HTML.
function element(title, rows) {
  const box = document.createElement("div");
  render(h(Lines, { title, rows }), box);
  return box;
}

function Lines({ title, rows }) {
  return h("div", { class: "lines" }, h("b", null, title), h("table", null, h("tbody", null, rows.map(([name, value, colour], at) =>
    h("tr", { key: at }, h("td", null, colour && h("i", { class: "dot", style: { background: colour } }), name), h("td", null, value))))));
}

function tooltip(more) {
  const { ink, card, line } = inkOf();
  return { confine: true, backgroundColor: card, borderColor: line, textStyle: { color: ink, fontSize: 12 }, ...more };
}

// Bars, one for each row of {name, parts: {kind: number}}, in the units that `shown` writes.
function barsOption(rows, shown, width, { isTall, axisName } = {}) {
  const kinds = [...new Set(rows.flatMap((row) => Object.keys(row.parts)))].filter((kind) => rows.some((row) => row.parts[kind]));
  const names = axis({ type: "category", data: rows.map((row) => row.name), inverse: !isTall, splitLine: { show: false }, name: axisName,
    nameLocation: "middle", nameGap: 26 });
  if (!isTall) names.axisLabel = { ...names.axisLabel, width: width > 500 ? 190 : 130, overflow: "truncate", color: inkOf().ink, hideOverlap: false };
  const sizes = axis({ type: "value", axisLabel: { color: inkOf().soft, fontSize: 11, hideOverlap: true, formatter: shown } });
  return {
    color: kinds.map(colourOf),
    legend: kinds.length > 1 ? legend({}) : { show: false },
    grid: { left: 8, right: 18, top: kinds.length > 1 ? legendHeight(kinds, width) : 8, bottom: isTall ? 26 : 4, containLabel: true },
    xAxis: isTall ? names : sizes,
    yAxis: isTall ? sizes : names,
    tooltip: tooltip({ trigger: "axis", axisPointer: { type: "shadow" }, formatter: (found) =>
      element(rows[found[0].dataIndex].title || found[0].name, found.filter((each) => each.value).map((each) => [each.seriesName, shown(each.value), each.color])) }),
    series: kinds.map((kind) => ({ name: kind, type: "bar", stack: "all", barMaxWidth: 22, barCategoryGap: "28%", data: rows.map((row) => row.parts[kind] || 0) })),
  };
}

// The lanes of a timeline; spans of one kind in a lane are one path, so that a hundred thousand are drawn at once.
function timelineOption(timed, width) {
  const end = Math.max(...timed.lanes.map((lane) => lane.starts.at(-1) + lane.lengths.at(-1)));
  const time = (tick) => seconds(tick * timed.tick_s);
  const { ink } = inkOf();
  const narrow = width < 600;
  const grid = { left: narrow ? 58 : 92, right: 14, top: 8, bottom: 62 };
  const drawn = (params, api) => {
    const lane = timed.lanes[params.dataIndex];
    const paths = new Map();
    const texts = [];
    const [left, right] = [params.coordSys.x, params.coordSys.x + params.coordSys.width];
    const middle = api.coord([0, params.dataIndex])[1];
    const height = Math.max(2, api.size([0, 1])[1] * 0.78);
    for (let at = 0; at < lane.starts.length; at += 1) {
      const from = Math.max(left, api.coord([lane.starts[at], 0])[0]);
      const to = Math.min(right, api.coord([lane.starts[at] + lane.lengths[at], 0])[0]);
      if (to <= left || from >= right) continue;
      const long = Math.max(to - from - (to - from > 4 ? 0.7 : 0), 0.4);
      if (!paths.has(lane.kinds[at])) paths.set(lane.kinds[at], []);
      paths.get(lane.kinds[at]).push(`M${from.toFixed(1)} ${(middle - height / 2).toFixed(1)}h${long.toFixed(2)}v${height.toFixed(1)}h-${long.toFixed(2)}z`);
      const text = timed.labels[lane.labels[at]];
      if (height > 11 && long > 6.2 * text.length + 8) {
        const style = { text, x: from + 4, y: middle, fill: "#fff", fontSize: 10.5, textVerticalAlign: "middle" };
        texts.push({ type: "text", silent: true, style });
      }
    }
    const shapes = [...paths].map(([kind, parts]) => ({ type: "path", silent: true, shape: { pathData: parts.join("") }, style: { fill: colourOf(timed.kinds[kind]) } }));
    return { type: "group", children: [...shapes, ...texts] };
  };
  const zoom = { xAxisIndex: 0, filterMode: "none", minValueSpan: 1 };
  return {
    grid,
    xAxis: axis({ type: "value", min: 0, max: end, axisLabel: { color: inkOf().soft, fontSize: 11, formatter: time, hideOverlap: true }, splitNumber: narrow ? 3 : 8 }),
    yAxis: axis({ type: "category", data: timed.lanes.map((lane) => lane.name), inverse: true, splitLine: { show: false }, axisTick: { show: false },
      axisLabel: { color: ink, fontSize: 11, width: grid.left - 8, overflow: "truncate" } }),
    dataZoom: [
      { type: "inside", ...zoom, zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false, moveOnMouseMove: true },
      { type: "slider", ...zoom, height: 18, bottom: 10, labelFormatter: time, showDataShadow: false, brushSelect: false, borderColor: inkOf().line,
        fillerColor: "#4c78a83a", textStyle: { color: inkOf().soft, fontSize: 10 } },
    ],
    series: [{ type: "custom", clip: true, renderItem: drawn, data: timed.lanes.map((_, at) => [0, at]), encode: { x: 0, y: 1 } }],
  };
}

// The number of the span of a lane at a tick, or -1.
function spanAt(lane, tick) {
  let [low, high] = [0, lane.starts.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (lane.starts[middle] <= tick) low = middle;
    else high = middle - 1;
  }
  return lane.starts[low] <= tick && tick <= lane.starts[low] + lane.lengths[low] ? low : -1;
}

function memoryOption(curve, timed, limit, width) {
  const time = (tick) => seconds(tick * timed.tick_s);
  const kinds = curve.kinds.map((kind, at) => [kind, at]).filter(([, at]) => curve.bytes.some((row) => row[at] !== 0));
  const { soft, ink } = inkOf();
  const end = Math.max(curve.starts.at(-1), ...timed.lanes.map((lane) => lane.starts.at(-1) + lane.lengths.at(-1)));
  const points = [...curve.starts.map((start, at) => [start, curve.states[at]]), [end, curve.states.at(-1)]];
  const line = { symbol: "none", silent: true, label: { formatter: `limit ${bytes(limit)}`, position: "insideEndTop", color: ink, fontSize: 11 }, lineStyle: { color: "#e45756", type: "dashed" }, data: [{ yAxis: limit }] };
  // A kind may be negative (a transient that is less than the gradients that do not exist yet), and is not drawn then.
  const held = ([start, , state]) => {
    const row = curve.bytes[state];
    const all = row.reduce((sum, x) => sum + x, 0);
    return element(`from ${time(start)}`, [...kinds.map(([kind, at]) => [kind, bytes(row[at]), colourOf(kind)]).reverse(), ["all", bytes(all)]]);
  };
  const most = Math.max(...curve.bytes.map((row) => row.reduce((sum, x) => sum + Math.max(x, 0), 0)));
  const isNear = limit && limit < 2.5 * most; // a limit far above would leave no room for the curve
  const highest = isNear ? Math.max(most, limit) : most;
  const interval = 2 ** Math.max(Math.round(Math.log2(highest / 5)), 0); // whole numbers of binary units
  return {
    color: kinds.map(([kind]) => colourOf(kind)),
    legend: legend({}),
    grid: { left: 8, right: 16, top: legendHeight(curve.kinds, width) + 6, bottom: 8, containLabel: true },
    xAxis: axis({ type: "value", min: 0, max: end, axisLabel: { color: soft, fontSize: 11, formatter: time, hideOverlap: true }, splitLine: { show: false } }),
    yAxis: axis({ type: "value", max: interval * Math.ceil((1.02 * highest) / interval), interval, axisLabel: { color: soft, fontSize: 11, formatter: (x) => bytes(Math.round(x)) } }),
    tooltip: tooltip({ trigger: "axis", formatter: (found) => held(found[0].value) }),
    series: kinds.map(([kind, at], number) => ({ name: kind, type: "line", stack: "all", step: "end", showSymbol: false, lineStyle: { width: 0 }, areaStyle: { opacity: 0.85 },
      emphasis: { disabled: true }, data: points.map(([start, state]) => [start, Math.max(curve.bytes[state][at], 0), state]), ...(number === 0 && isNear ? { markLine: line } : {}) })),
  };
}
