"use strict";
// Numbers as text, and the colours of placements and kinds. Nothing here or elsewhere makes HTML of text: what a page
// shows of its content goes through `h`, which escapes, or is drawn on a canvas.
const { echarts, h, render, Fragment, useState, useMemo, useEffect, useRef } = library;

const digits = (number) =>
  Math.abs(number) < 999.5 ? String(Number(number.toPrecision(3))) : number.toFixed(0);

function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s < 0) return `−${seconds(-s)}`;
  if (s === 0) return "0";
  for (const [unit, scale] of [["s", 1], ["ms", 1e3], ["µs", 1e6]]) {
    if (s * scale >= 1) return `${digits(s * scale)} ${unit}`;
  }
  return `${digits(s * 1e6)} µs`;
}

function bytes(size) {
  if (size === null || size === undefined) return "–";
  if (size < 0) return `−${bytes(-size)}`;
  for (const [power, unit] of [[4, "TiB"], [3, "GiB"], [2, "MiB"], [1, "KiB"]]) {
    if (size >= 1024 ** power) return `${digits(size / 1024 ** power)} ${unit}`;
  }
  return `${size} B`;
}

const percent = (share, places = 1) =>
  share === null || share === undefined ? "–" : `${(100 * share).toFixed(places)} %`;

const count = (number) => {
  if (number === null || number === undefined) return "–";
  return Math.abs(number) < 999.5 ? digits(number) : digits(number).replace(/\B(?=(\d{3})+$)/g, " ");
};

// "1–30, 32" of ["1", ..., "30", "32"]; other names are listed.
function ranges(names) {
  const numbers = names.map((name) => (/^\d+$/.test(name) ? Number(name) : NaN));
  if (numbers.some(Number.isNaN)) return names.length > 6 ? `${names.slice(0, 5).join(", ")}, …` : names.join(", ");
  const parts = [];
  for (let i = 0; i < numbers.length; i += 1) {
    let end = i;
    while (numbers[end + 1] === numbers[end] + 1) end += 1;
    parts.push(end === i ? String(numbers[i]) : `${numbers[i]}–${numbers[end]}`);
    i = end;
  }
  return parts.length > 8 ? `${parts.slice(0, 7).join(", ")}, …` : parts.join(", ");
}

const PALETTE = ["#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#d6a800", "#ff9da6", "#9d755d", "#8c8c8c"];
const SPLITS = ["#3778c2", "#1a9e8f", "#8a5cd0", "#d0558f", "#5e8f2a", "#b8860b"];
const NAMED = {
  "compute forward": "#4c78a8", "compute backward": "#2f5580", forward: "#4c78a8", backward: "#f58518",
  "backward of inputs": "#f58518", "backward of weights": "#d6a800", update: "#b279a2", "wait update": "#b279a2", idle: "#8c8c8c66",
  "bubble and sends": "#8c8c8c", "hidden behind compute": "#c9c9c9", parameters: "#4c78a8", gradients: "#e45756",
  optimizer: "#b279a2", activations: "#f58518", gathered: "#72b7b2", transient: "#d6a800", recomputed: "#9d755d", waiting: "#e0529c", fetched: "#5e8f2a",
  arguments: "#ff9da6", buffers: "#8c8c8c", constants: "#54a24b", collective: "#e45756", reduction: "#e45756",
  gather: "#72b7b2", "gather ahead": "#72b7b2", gathers: "#72b7b2", reductions: "#e45756",
};
const OTHERS = new Map();

// The same colour for the same kind in all charts.
function colourOf(kind) {
  if (NAMED[kind]) return NAMED[kind];
  if (/^collectives within/.test(kind)) return "#72b7b2";
  if (/^collectives across/.test(kind)) return "#e45756";
  if (!OTHERS.has(kind)) OTHERS.set(kind, PALETTE[OTHERS.size % PALETTE.length]);
  return OTHERS.get(kind);
}

// [colour, meaning] of a placement: "S(0)", "S(1/8)", "P", "B", "B*", "L(0)", "E(0)".
function placement(text) {
  const dim = /^S\((\d+)/.exec(text);
  if (dim) return [SPLITS[Math.min(Number(dim[1]), SPLITS.length - 1)], `split along dim ${dim[1]}`];
  if (text === "P") return ["#e8662e", "pending sum"];
  if (text === "B") return ["var(--whole)", "whole"];
  if (text === "B*") return ["var(--used)", "whole, gradient a pending sum"];
  return ["#9d755d", text[0] === "E" ? "rows of its own experts" : "of its own tokens"];
}

const layoutText = (layout) => layout.join("");
const cssOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
