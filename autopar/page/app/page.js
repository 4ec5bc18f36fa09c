"use strict";
// The page: its content is read from the element that holds it, and drawn.

function App({ content }) {
  const [chosen, choose] = useState(content.views.length ? 0 : null);
  const [about, setAbout] = useState(null);
  const floating = useRef(null);
  const place = (event) => {
    const box = floating.current;
    if (!box) return;
    const area = event.currentTarget instanceof Element ? event.currentTarget.getBoundingClientRect() : null;
    const [x, y] = event.clientX === undefined ? [area.left, area.bottom] : [event.clientX, event.clientY];
    const [width, height] = [box.offsetWidth, box.offsetHeight];
    box.style.left = `${Math.max(6, Math.min(x + 14, window.innerWidth - width - 10))}px`;
    box.style.top = `${y + 18 + height > window.innerHeight ? Math.max(6, y - height - 12) : y + 18}px`;
  };
  const hover = useMemo(() => ({
    show: (event, shown) => { setAbout({ shown, event: { clientX: event.clientX, clientY: event.clientY, currentTarget: event.currentTarget } }); },
    move: (event) => place(event),
    hide: () => setAbout(null),
  }), []);
  useEffect(() => { if (about) place(about.event); }, [about]);
  const view = chosen === null ? null : content.views[chosen];
  const isSweep = content.points.length > 0;
  const beside = isSweep ? [] : content.views;
  return h(Fragment, null,
    h("header", null, h("h1", null, content.title), view && h("span", { id: "shown", class: "soft" }, view.name),
      !isSweep && content.views.length > 1 && h("label", null, "plan ", h("select", { id: "switch", value: chosen, onChange: (event) => choose(Number(event.target.value)) },
        content.views.map((each, at) => h("option", { key: at, value: at }, each.name))))),
    h("main", null,
      isSweep && h(Sweep, { points: content.points, chosen, choose: (number) => number !== null && choose(number) }),
      view && h(Fragment, null, h(Summary, { view }), h(Compared, { rows: content.compared, chosen, choose }),
        h(Blocks, { key: isSweep ? `blocks ${chosen}` : "blocks", view, hover }), h(Times, { views: beside, view }), h(TimelineSection, { key: `lanes ${chosen}`, view, hover }),
        h(MemorySection, { key: `memory ${chosen}`, view }), h(Ranks, { view }))),
    h("footer", null, `Predicted by the cost model of autopar ${content.version}; nothing here was measured. This file fetches nothing.`,
      h("details", null, h("summary", null, "Apache ECharts and Preact are in it: their licences"), h("pre", null, document.getElementById("licences").textContent))),
    h("div", { id: "about", ref: floating, class: about ? "" : "away", role: "tooltip" }, about && about.shown));
}

const page = document.getElementById("page");

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

async function start() {
  if (!window.DecompressionStream) page.textContent = "This browser cannot unpack the content: a newer one can (of 2023 or later).";
  else {
    const content = await unpacked(document.getElementById("content").textContent);
    if (content.format === 1) render(h(App, { content }), page);
    else page.textContent = `The content has format ${content.format}, this script reads 1.`;
  }
  document.body.dataset.ready = "yes";
}

start();
