"use strict";
// Looks plans up; the only arithmetic is a comparison, a share of the whole and a number of servers. Every figure comes
// from the embedded document, by its path in `kvplan estimate --format json`.
const GIB = 2 ** 30;
const ROWS = [["weights", "weights"], ["buffers", "buffers"], ["activations", "activations"], ["cuda_graphs", "CUDA graphs"],
  ["non_torch", "non-torch"], ["lora", "LoRA"], ["kv_cache", "KV cache"], ["unused", "unused"], ["missing", "missing"]];
const SELECTED = ["gpu", "kv_cache_dtype", "quantization", "dtype", "tensor_parallel_size", "pipeline_parallel_size"];
const STOPS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048];
const number = new Intl.NumberFormat("en-US");
const byId = (id) => document.getElementById(id);
const state = { chart: 0, chosenDigits: [], digits: [], users: 0 }; // digits: the possible position nearest to the chosen one
let data = null, USERS = STOPS; // USERS: the stops, with the number that the page was made for

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// --- looking up ------------------------------------------------------------------------------------------------------

function value(path, digits = state.digits) {
  const chart = data.charts[state.chart], column = chart.columns[path];
  let index = 0;
  for (const axis of column.axes) index = index * chart.axes[axis].values.length + digits[axis];
  return column.values[index];
}

function textOf(path, digits = state.digits) {
  const index = value(path, digits);
  return index === null ? null : data.charts[state.chart].texts[index];
}

// A request is at most as long as the context: a mean beyond it stands for a full one.
function possible(digits) {
  const mean = place("mean_tokens"), full = digits.with(mean, axes()[mean].values.length - 1);
  return value("error", digits) !== null && value("error", full) === null ? full : digits;
}

const axes = () => data.charts[state.chart].axes;
const place = (name) => axes().findIndex((axis) => axis.name === name);
const chosen = (name) => axes()[place(name)].values[state.digits[place(name)]];
const numUsers = () => USERS[state.users];

// "yes", "no" or "close": whether the plan serves the users wanted; null where there is no plan.
function verdict(digits = state.digits) {
  if (value("error", digits) !== null) return null;
  const replicas = value("concurrency.replicas", digits), wanted = numUsers();
  if (!value("fits", digits) || value("concurrency.users_high", digits) * replicas < wanted) return "no";
  return value("concurrency.users_low", digits) * replicas >= wanted ? "yes" : "close";
}

function gib(bytes) { // as Python rounds: an exact half to the even digit
  const hundredths = bytes / GIB * 100, below = Math.floor(hundredths);
  const isHalf = hundredths - below === 0.5 && Number.isInteger(bytes / GIB * 8);
  return ((isHalf ? below + below % 2 : Math.round(hundredths)) / 100)
    .toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
}

// --- showing ---------------------------------------------------------------------------------------------------------

function datum(path, text) {
  const field = element("data", { "data-path": path, value: String(value(path)) });
  field.textContent = text;
  return field;
}

function answerText() {
  const error = textOf("error");
  if (error !== null) return `${chosen("model")} on ${chosen("gpu")} (${chosen("engine")}): cannot be planned: ${error}`;
  const gpus = value("inputs.num_gpus"), replicas = value("concurrency.replicas");
  const where = `${chosen("model")} on ${gpus > 1 ? `${gpus} x ` : ""}${chosen("gpu")} (${chosen("engine")})`;
  if (!value("fits")) return `No: ${where} does not fit: ${textOf("limits.0.text")}.`;
  const [low, high, likely] = ["users_low", "users_high", "users"].map((name) => value(`concurrency.${name}`));
  const range = low === null || low === high ? "" : ` (${number.format(low)}–${number.format(high)})`;
  const length = chosen("mean_tokens") === data.full ? `${chosen("max_model_len")} tokens each` : `${chosen("mean_tokens")} tokens on average`;
  const each = (low || likely) * replicas;
  const serves = `${where} serves ${number.format(likely)}${range} at ${length}${replicas > 1 ? ` on each of ${replicas} data-parallel ranks` : ""}`;
  const servers = each ? Math.ceil(numUsers() / each) : 0;
  const more = servers > 1 ? `; ${number.format(numUsers())} users need ${number.format(servers)} such servers` : "";
  const word = { yes: `Yes, ${number.format(numUsers())} ${numUsers() > 1 ? "users fit" : "user fits"}`,
    no: `No, ${number.format(numUsers())} users do not fit on one server`, close: "Too close to call" }[verdict()];
  return `${word}: ${serves}${more}.${priceText(servers)}`;
}

function priceText(servers) {
  const price = data.prices && data.prices[chosen("gpu")];
  if (!price || !servers) return "";
  const gpus = value("inputs.num_gpus") * servers;
  return ` $${(price * gpus).toFixed(2)} an hour for ${gpus} ${gpus > 1 ? "GPUs" : "GPU"}.`;
}

function showBar(isPlanned) {
  const bar = byId("bar");
  bar.replaceChildren();
  if (!isPlanned) return;
  const missing = value("memory.missing"), total = value("memory.total") + missing; // the rows add up to both
  for (const [name, label] of ROWS) {
    const size = value(`memory.${name}`);
    if (!size || name === "missing") continue;
    const share = 100 * size / total;
    const part = element("i", { class: name, style: `width: ${share}%`, title: `${label}: ${gib(size)} GiB` });
    if (share > 12) part.textContent = `${label} ${gib(size)}`;
    bar.append(part);
  }
  const budget = 100 * value("memory.budget") / total;
  if (missing) bar.append(element("u", { style: `left: ${100 - 100 * missing / total}%`, title: `${gib(missing)} GiB more than the GPU has` }));
  if (budget < 100) bar.append(element("b", { style: `left: ${budget}%`, title: `budget: ${gib(value("memory.budget"))} GiB` }));
}

function showMemory(isPlanned) {
  const body = document.querySelector("#memory tbody");
  body.replaceChildren();
  if (!isPlanned) return;
  const total = value("memory.total");
  for (const [name, label] of [...ROWS, ["total", "total"], ["budget", "budget of the server"]]) {
    const size = value(`memory.${name}`);
    if (!size && (name === "lora" || name === "missing")) continue;
    const swatch = element("td", {}, ...(name === "total" || name === "budget" ? [] : [element("span", { class: `swatch ${name}` })]));
    body.append(element("tr", name === "total" ? { class: "sum" } : {}, swatch, element("th", { scope: "row" }, label),
      element("td", { class: "n" }, datum(`memory.${name}`, gib(size))),
      element("td", { class: "n" }, `${(100 * size / total).toFixed(1)}%`)));
  }
}

function showUsers(isPlanned) {
  const body = document.querySelector("#users tbody");
  body.replaceChildren();
  if (!isPlanned) return;
  const rows = [["users at once, likely", "concurrency.users"], ["at least", "concurrency.users_low"], ["at most", "concurrency.users_high"],
    ["concurrency in the server's log", "concurrency.max"], ["scheduler's limit", "concurrency.max_num_seqs"], ["tokens in the KV cache", "kv.tokens"],
    ["blocks", "kv.num_blocks"], ["tokens a block", "kv.block_size"], ["KV bytes a token, each GPU", "kv.bytes_per_token"],
    ["KV bytes a full context, each GPU", "kv.bytes_per_request"], ["bytes missing, each GPU", "deficit"], ["layers on the GPUs", "slots.gpu_layers"],
    ["tokens/s of one user, likely", "slots.speed.empty.likely"]].filter(([, path]) => path in data.charts[state.chart].columns);
  for (const [label, path] of rows) {
    const figure = value(path);
    if (figure === null || (path === "deficit" && !figure)) continue;
    const text = path === "concurrency.max" ? figure.toFixed(2) : number.format(figure);
    body.append(element("tr", {}, element("th", { scope: "row" }, label), element("td", { class: "n" }, datum(path, text))));
  }
  body.append(element("tr", {}, element("th", { scope: "row" }, "limit"), element("td", { class: "n", style: "white-space: normal" },
    element("span", { "data-path": "limits.0.text" }, textOf("limits.0.text")))));
}

// For each setting: the values that serve the users wanted, the others as they are.
function showReach() {
  const body = document.querySelector("#reach tbody");
  body.replaceChildren();
  axes().forEach((axis, index) => {
    if (axis.values.length < 2) return;
    const serving = axis.values.filter((_, digit) => ["yes", "close"].includes(verdict(possible(state.chosenDigits.with(index, digit)))));
    body.append(element("tr", {}, element("th", { scope: "row" }, axis.label), element("td", { class: "n" }, axis.values[state.digits[index]]),
      element("td", {}, serving.length === axis.values.length ? "all values" : serving.join(" · ") || "none")));
  });
}

function show() {
  state.digits = possible(state.chosenDigits);
  const isPlanned = value("error") === null;
  byId("answer").textContent = answerText();
  byId("answer").classList.toggle("no", verdict() !== "yes");
  byId("command").textContent = (isPlanned && textOf("flags.command")) || `(nothing to run: it ${isPlanned ? "does not fit" : "cannot be planned"})`;
  byId("copy").disabled = !(isPlanned && value("flags.command") !== null);
  byId("copied").textContent = "";
  showBar(isPlanned);
  showMemory(isPlanned);
  showUsers(isPlanned);
  showReach();
  const mean = document.querySelector('[name="mean_tokens"]');
  if (mean) mean.closest("label").querySelector(".value").textContent = chosen("mean_tokens");
  const words = axes().map((axis, index) => [axis.name, axis.values[state.digits[index]]]);
  history.replaceState(null, "", `#${new URLSearchParams([...words, ["users", numUsers()]])}`);
}

// --- choosing --------------------------------------------------------------------------------------------------------

function control(label, name, values, digit, asList, choose) {
  const field = element("span", { class: "value" }, values[digit]);
  const title = element("span", { class: "name" }, label, ...(asList ? [] : [field]));
  if (values.length < 2) return element("div", { class: "fixed" }, element("span", { class: "name" }, label, field));
  const input = asList
    ? element("select", { name }, ...values.map((text, index) => element("option", { value: index }, text)))
    : element("input", { type: "range", name, min: 0, max: values.length - 1, step: 1 });
  input.value = digit;
  const announce = () => { if (!asList) input.setAttribute("aria-valuetext", values[Number(input.value)]); };
  announce();
  const take = () => { field.textContent = values[Number(input.value)]; announce(); choose(Number(input.value)); };
  for (const happening of ["input", "change"]) input.addEventListener(happening, take);
  return element("label", {}, title, input);
}

function build() {
  const form = byId("controls"), names = data.charts.map((chart) => `${chart.model}, ${chart.server}`);
  const settings = axes().map((axis, index) => [axis, index]).filter(([axis]) => !["model", "engine"].includes(axis.name));
  form.replaceChildren(
    control("Model and server", "chart", names, state.chart, true, (index) => { turnTo(index); build(); show(); byId("controls").elements.chart.focus(); }),
    control("Users at once", "users", USERS.map(String), state.users, false, (index) => { state.users = index; show(); }),
    ...settings.map(([axis, index]) => control(axis.label, axis.name, axis.values, state.chosenDigits[index], SELECTED.includes(axis.name),
      (digit) => { state.chosenDigits[index] = digit; show(); })));
}

// Another chart at the same settings, as far as it has them.
function turnTo(index) {
  const before = state.chosenDigits.length ? new Map(axes().map((axis, i) => [axis.name, axis.values[state.chosenDigits[i]]])) : new Map();
  state.chart = index;
  state.chosenDigits = axes().map((axis) => Math.max(axis.values.indexOf(before.get(axis.name)), -1))
    .map((digit, i) => (digit < 0 ? axes()[i].start : digit));
}

// The position that the address names: #gpu=l40s&users=8.
function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  const index = data.charts.findIndex((chart) => chart.model === words.get("model") && chart.server === words.get("engine"));
  turnTo(Math.max(index, 0));
  axes().forEach((axis, i) => {
    const digit = axis.values.indexOf(words.get(axis.name));
    if (digit >= 0) state.chosenDigits[i] = digit;
  });
  state.users = Math.max(USERS.indexOf(Number(words.get("users") ?? data.users)), 0);
  if (!location.hash) turnToFit();
}

// The first position that serves the users, with as few settings changed as can be: one, then two; else the start.
function turnToFit() {
  const start = state.chosenDigits, moves = axes().flatMap((axis, i) => axis.values.map((_, digit) => [i, digit]));
  const single = moves.map(([i, digit]) => start.with(i, digit));
  const serves = (digits) => verdict(possible(digits)) === "yes";
  state.chosenDigits = [start, ...single].find(serves)
    ?? single.flatMap((digits) => moves.map(([i, digit]) => digits.with(i, digit))).find(serves) ?? start;
}

async function copy() {
  const text = byId("command").textContent;
  try {
    await navigator.clipboard.writeText(text);
    byId("copied").textContent = "Copied.";
  } catch {
    getSelection().selectAllChildren(byId("command"));
    byId("copied").textContent = "Selected; press Ctrl+C.";
  }
}

async function start() {
  try {
    const packed = Uint8Array.from(atob(byId("plans").textContent.trim()), (sign) => sign.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    data = await new Response(stream).json();
  } catch (error) {
    byId("problem").hidden = false;
    byId("problem").textContent = `The plans in this page cannot be read (${error}); make it again with kvplan explore.`;
    return;
  }
  USERS = [...new Set([...STOPS, data.users])].sort((a, b) => a - b);
  readAddress();
  build();
  show();
  byId("copy").addEventListener("click", copy);
  addEventListener("hashchange", () => { readAddress(); build(); show(); });
  document.documentElement.dataset.ready = "yes";
}

start();
