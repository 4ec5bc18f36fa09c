"use strict";
// The model as blocks within blocks: folded and unfolded, searched by FQN, with what a block is and takes on hover.

// The bands of a layout: a colour for each mesh axis.
function Band({ layout }) {
  return h("span", { class: "axes" }, layout.map((each, at) => h("i", { key: at, class: each === "B*" ? "used" : "", style: { background: placement(each)[0] } })));
}

function Share({ layouts }) {
  if (!layouts || !layouts.length) return h("span", { class: "band none" });
  const all = layouts.reduce((sum, [, s]) => sum + s, 0); // a flex container leaves room where what grows sums up to less than 1
  return h("span", { class: "band" }, layouts.map(([layout, s], at) => h("span", { key: at, class: "share", style: { flexGrow: (1000 * s) / all } }, h(Band, { layout }))));
}

const pathOf = (path, block) => (path ? `${path}.${block.names[0]}` : block.names[0]);
const isModule = (block) => block.kind === "module";
// Names between the dots of an FQN, each with those of all copies.
const stepsOf = (steps, block) => (block.names[0] === "" ? steps : [...steps, ...splitName(block)]);
const splitName = (block) => (block.kind === "op" || isModule(block) ? [block.names] : block.names[0].split(".").map((part) => [part]));

// Whether a query such as "layers.17.mlp" or "q_proj" names the block, or one of the copies that it stands for.
function isFound(steps, words) {
  const [first, last] = [words[0], words.at(-1)];
  for (let at = 0; at + words.length <= steps.length; at += 1) {
    const fits = words.every((word, number) => steps[at + number].some((name) => {
      const [one, other] = [name.toLowerCase(), word];
      if (words.length === 1) return one.includes(other);
      if (number === 0) return one.endsWith(first);
      return number === words.length - 1 ? one.startsWith(last) : one === other;
    }));
    // What is found is the block that the last word names, not all that is within it.
    if (fits && at + words.length === steps.length) return true;
  }
  return false;
}

// Paths that a query finds, and those of all modules around them.
function search(root, query) {
  const words = query.trim().toLowerCase().split(".");
  const [found, around] = [new Set(), new Set()];
  const visit = (block, path, steps, outside) => {
    const [here, own] = [pathOf(path, block), stepsOf(steps, block)];
    const key = isModule(block) ? here : `${here} ${block.called}`;
    const isOp = block.kind === "op" && words.length === 1 && block.called.toLowerCase().includes(words[0]);
    if (own.length && (isOp || isFound(own, words))) {
      found.add(key);
      outside.forEach((each) => around.add(each));
    }
    (block.blocks || []).forEach((each) => visit(each, here, own, [...outside, here]));
  };
  if (words.some(Boolean)) visit(root, "", [], []);
  return { found, around };
}

// Modules that are open at first: the way to what takes most of the time.
function firstOpen(root) {
  const open = new Set();
  let [block, path] = [root, ""];
  for (let depth = 0; block && depth < 6; depth += 1) {
    path = pathOf(path, block);
    open.add(path);
    const inside = (block.blocks || []).filter(isModule);
    block = inside.toSorted((one, other) => (other.time_s || 0) * other.names.length - (one.time_s || 0) * one.names.length)[0];
    if (block && !(block.blocks || []).some(isModule)) break;
  }
  return open;
}

function allOpen(root) {
  const open = new Set();
  const visit = (block, path) => {
    const here = pathOf(path, block);
    open.add(here);
    (block.blocks || []).filter(isModule).forEach((each) => visit(each, here));
  };
  visit(root, "");
  return open;
}

const title = (block) => (block.names.length > 1 ? ranges(block.names) : block.names[0] || "model");

function ModuleBlock({ block, path, level, state }) {
  const here = pathOf(path, block);
  const isOpen = state.open.has(here) || state.results.around.has(here);
  const isMatch = state.results.found.has(here);
  const about = { onMouseEnter: (event) => state.tell(event, block, here), onMouseMove: state.move, onMouseLeave: state.hush,
    onFocus: (event) => state.tell(event, block, here), onBlur: state.hush };
  return h("div", { class: `block${isOpen ? " open" : ""}${isMatch ? " found" : ""}`, "data-path": here },
    h("button", { class: "head", "aria-expanded": isOpen, onClick: () => state.fold(here), ...about },
      h(Share, { layouts: block.layouts }), h("span", { class: "fold", "aria-hidden": true }, isOpen ? "▾" : "▸"),
      h("span", { class: "name" }, title(block)), block.names.length > 1 && h("span", { class: "copies" }, `×${block.names.length}`),
      h("span", { class: "figures" }, block.time_s ? seconds(block.time_s * block.names.length) : "", h("small", null, block.bytes ? bytes(block.bytes) : ""))),
    isOpen && h("div", { class: "inside" }, (block.blocks || []).map((each, at) => isModule(each)
      ? h(ModuleBlock, { key: `${at}`, block: each, path: here, level: level + 1, state })
      : h(LeafBlock, { key: `${at}`, block: each, path: here, state }))));
}

function LeafBlock({ block, path, state }) {
  const here = `${pathOf(path, block)} ${block.called}`;
  const tell = (event) => state.tell(event, block, pathOf(path, block));
  const isMatch = state.results.found.has(here);
  return h("span", { class: `leaf ${block.kind === "op" ? "op" : "tensor"}${isMatch ? " found" : ""}`, tabIndex: 0, "data-path": here,
    onMouseEnter: tell, onMouseMove: state.move, onMouseLeave: state.hush, onFocus: tell, onBlur: state.hush, onClick: tell },
  h(Band, { layout: block.layout || [] }), h("span", { class: "name" }, block.names[0]),
  (block.collectives || []).length > 0 && h("span", { class: "sends", title: "has collectives" }, "⇄"),
  block.time_s ? h("small", null, seconds(block.time_s)) : block.bytes ? h("small", null, bytes(block.bytes)) : null);
}

// What a block is and takes, beside the pointer.
function About({ block, path, axes }) {
  const rows = [];
  const times = block.times || 1;
  const add = (name, value) => value && rows.push([name, value]);
  if (isModule(block)) {
    add("copies", block.names.length > 1 && `${block.names.length}: ${ranges(block.names)}`);
    add("a copy takes", block.time_s && seconds(block.time_s));
    add("all together", times > 1 && block.time_s && seconds(block.time_s * times));
    add("holds", block.bytes && `${bytes(block.bytes)} a copy`);
    (block.layouts || []).forEach(([layout, s], at) => rows.push([at ? "" : "results", h(Fragment, null, h(Band, { layout }), ` ${layoutText(layout)}, ${seconds(s)}`)]));
  } else {
    add("line", block.line);
    add("value", block.value);
    if (block.signatures) block.signatures.forEach((each, at) => add(`on ${axes[at]}`, each));
    else (block.layout || []).forEach((each, at) => add(`on ${axes[at]}`, `${each}, ${placement(each)[1]}`));
    Object.entries(block.seconds || {}).forEach(([phase, s]) => add(phase, s && seconds(s)));
    (block.collectives || []).forEach((each) => add(each.phase, `${each.count} ${each.kind} ${each.axis}, ${bytes(each.bytes)}, ${seconds(each.s)}`));
    add(block.kind === "op" ? "saves" : "holds", block.bytes && bytes(block.bytes));
    add("copies", times > 1 && `${times}; all take ${seconds((block.time_s || 0) * times)}`);
    (block.remarks || []).forEach((each) => rows.push(["", each]));
  }
  add(block.stages && block.stages.length > 1 ? "stages" : "stage", block.stages && ranges(block.stages.map(String)));
  const name = isModule(block) ? path || "model" : block.kind === "op" ? `${path} ${block.called}` : `${block.called}`;
  return h("div", { class: "lines" }, h("b", null, name.replace(/^\./, "")), h("span", { class: "kind" }, block.kind),
    h("table", null, h("tbody", null, rows.map(([key, value], at) => h("tr", { key: at }, h("td", null, key), h("td", null, value))))));
}

function Legend({ root }) {
  const seen = useMemo(() => {
    const found = new Map();
    const visit = (block) => {
      (block.layout || []).forEach((each) => found.set(placement(each)[1], each));
      (block.blocks || []).forEach(visit);
    };
    visit(root);
    return [...found.values()].sort();
  }, [root]);
  return h("div", { class: "legend" }, seen.map((each) => h("span", { key: each }, h("span", { class: "axes" }, h("i", { class: each === "B*" ? "used" : "", style: { background: placement(each)[0] } })), `${each} ${placement(each)[1]}`)));
}

function Blocks({ view, hover }) {
  const { root } = view;
  const [open, setOpen] = useState(() => firstOpen(root));
  const [query, setQuery] = useState("");
  const [at, setAt] = useState(0);
  const box = useRef(null);
  const results = useMemo(() => search(root, query), [root, query]);
  const fold = (path) => setOpen((before) => {
    const after = new Set([...before, ...results.around]);
    if (!after.delete(path)) after.add(path);
    else results.around.delete(path);
    return after;
  });
  useEffect(() => {
    const marked = box.current.querySelectorAll(".found");
    marked.forEach((each, number) => each.classList.toggle("at", number === at % marked.length));
    if (query && marked.length) marked[at % marked.length].scrollIntoView({ block: "nearest" });
  }, [query, at, root]);
  const tell = (event, block, path) => hover.show(event, h(About, { block, path, axes: view.axes }));
  const state = { open, results, fold, tell, move: hover.move, hush: hover.hide };
  const typed = (event) => { setQuery(event.target.value); setAt(0); };
  return h("section", { id: "model" },
    h("div", { class: "bar" }, h("h2", null, "Model"),
      h("input", { type: "search", id: "search", placeholder: "Search by FQN: layers.17.mlp, q_proj.weight …", "aria-label": "Search by FQN", value: query, onInput: typed,
        onKeyDown: (event) => event.key === "Enter" && setAt(at + 1) }),
      h("span", { id: "hits", class: "soft", "aria-live": "polite" }, query.trim() ? `${results.found.size} found` : ""),
      h("button", { id: "fold-all", onClick: () => { setOpen(new Set([root.names[0]])); setQuery(""); } }, "Fold all"),
      h("button", { id: "unfold-all", onClick: () => setOpen(allOpen(root)) }, "Unfold all")),
    h(Legend, { root }),
    h("p", { class: "soft" }, `A band has a colour for each mesh axis (${view.axes.join(", ")}); that of a module shows how its results lie, by time. Copies that are alike are one block. Hover for line, bytes and milliseconds.${view.schedule ? " In stages, times are of all microbatches, of one device of each stage." : ""}`),
    h("div", { class: "diagram", ref: box }, h(ModuleBlock, { block: root, path: "", level: 0, state })));
}
