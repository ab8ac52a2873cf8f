"use strict";
// Chat or complete with the served model, and see where every token came from.
// What the model says enters the page as text nodes only.

const $ = (id) => document.getElementById(id);
const KEPT = ["temperature", "top_p", "max_tokens", "seed", "thinking", "system"];
const COMPLETION_TOKENS = 256; // the API's own default of 16 is too few to see anything
const SPEED_WINDOW = 1000; // ms that "tokens/s now" looks back
const READOUT_EVERY = 120; // ms; digits that change faster cannot be read
const BLOCK = 200; // tokens after which a line break starts a new block: layout stays local in long answers

const state = {
  messages: [], // of this chat, as the API takes them
  models: [],
  shown: [], // the answers of the last turn: with the drafter and, when compared, without it
  current: null, // the one that grows
  controller: null, // aborts what runs
  frame: 0,
  readoutAt: 0,
};

function element(tag, className = "", text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.textContent = text;
  return node;
}

// A browser may forbid storage; the page then forgets, and works.
function recall(storage, name) {
  try {
    return window[storage].getItem(name) ?? "";
  } catch {
    return "";
  }
}

function keep(storage, name, value) {
  try {
    window[storage].setItem(name, value);
  } catch {
    return;
  }
}

/** Whole from 10 ms on. */
function milliseconds(number) {
  if (!Number.isFinite(number)) return "–";
  return `${number < 10 ? number.toFixed(1) : Math.round(number).toLocaleString("en")} ms`;
}

/** Three digits or so: 0.42, 7.31, 61.4, 238, 5,828. */
function digits(number) {
  if (!Number.isFinite(number)) return "–";
  const decimals = number >= 100 ? 0 : number >= 10 ? 1 : 2;
  return number.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

// ---- The API

class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const wordsOf = (error) => (typeof error === "string" ? error : error?.message);

async function failureOf(response) {
  const words = await response.json().then((body) => wordsOf(body.error), () => "");
  return new Failure(words || `The server answered ${response.status} ${response.statusText}.`, response.status);
}

async function call(path, options = {}) {
  const key = recall("sessionStorage", "api_key");
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Failure("The server cannot be reached.");
  }
  if (!response.ok) throw await failureOf(response);
  return response;
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => (clearTimeout(timer), reject(signal.reason)), { once: true });
  });
}

async function healthy(signal) {
  try {
    return (await fetch("health", { signal })).ok;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return false;
  }
}

/** What `attempt` returns, once the engine is up. A 503 of a healthy server is a full queue: an error like others. */
async function whenReady(attempt, signal) {
  for (;;) {
    try {
      return await attempt();
    } catch (error) {
      if (error.status !== 503 || (await healthy(signal))) throw error;
      say("The model is loading. This goes on by itself.");
      do await pause(1000, signal);
      while (!(await healthy(signal)));
      say("");
    }
  }
}

/** The data of each server-sent event; comments are dropped. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (buffer + value).split(/\r?\n\r?\n/);
      buffer = blocks.pop();
      for (const block of blocks) {
        const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // already failed or aborted: the caller has the error
  }
}

// ---- Measuring

/** Speed and acceptance of one answer, from when its tokens came and which of them were drafted. */
class Meter {
  constructor(speculative) {
    this.speculative = speculative;
    this.histogram = []; // index: accepted drafts of a round
    this.drafts = 0; // of the round that has not ended
    this.count = 0;
    this.recent = []; // [ms, tokens]
    this.sentAt = this.lengthGiven = this.firstGiven = this.firstAt = null;
  }

  start(now) {
    this.sentAt = now;
  }

  add(tokens, now) {
    if (this.firstAt === null) {
      this.firstAt = now;
      this.firstCount = tokens.length;
    }
    this.lastAt = now;
    this.recent.push([now, tokens.length]);
    for (const token of tokens) {
      this.count += 1;
      if (token.drafted) this.drafts += 1;
      else if (this.count > 1 && this.speculative) this.endRound(); // the first token is of the prefill, of no round
    }
  }

  endRound() {
    while (this.histogram.length <= this.drafts) this.histogram.push(0);
    this.histogram[this.drafts] += 1;
    this.drafts = 0;
  }

  /** The server's figures also know the last round, which may have been cut. */
  settle(metrics) {
    this.firstGiven = metrics?.time_to_first_token_ms ?? null;
    const drafting = metrics?.speculative_decoding;
    if (!this.speculative || !drafting) return;
    this.histogram = drafting.acceptance_histogram ?? this.histogram;
    this.lengthGiven = drafting.mean_acceptance_length ?? null;
  }

  get first() {
    return this.firstGiven ?? (this.firstAt === null ? NaN : this.firstAt - this.sentAt);
  }

  /** Tokens a second after the first chunk; of the whole request if all came in one. */
  get mean() {
    if (this.firstAt === null) return NaN;
    if (this.lastAt > this.firstAt) return (this.count - this.firstCount) / ((this.lastAt - this.firstAt) / 1000);
    return this.count / ((this.lastAt - this.sentAt) / 1000);
  }

  now(now) {
    this.recent = this.recent.filter(([at]) => at > now - SPEED_WINDOW);
    if (this.firstAt === null) return NaN;
    const tokens = this.recent.reduce((sum, [, count]) => sum + count, 0);
    return tokens / (Math.min(SPEED_WINDOW, Math.max(now - this.firstAt, 100)) / 1000);
  }

  /** Tokens a round emits, the target's own included. */
  get length() {
    if (this.lengthGiven !== null) return this.lengthGiven;
    const rounds = this.histogram.reduce((sum, count) => sum + count, 0);
    return this.histogram.reduce((sum, count, accepted) => sum + count * (accepted + 1), 0) / rounds;
  }
}

// ---- Showing an answer

const ENDINGS = { length: "ended at the token limit", abort: "aborted by the server", error: "ended by an error" };

class Answer {
  constructor(title, speculative) {
    this.title = title;
    this.meter = new Meter(speculative);
    this.pending = [];
    this.raw = this.content = this.ending = "";
    this.element = element("article", "answer");
    this.tokens = element("div", "tokens");
    this.plain = element("div", "plain");
    this.note = element("p", "note");
    this.element.append(element("h3", "who", title), this.tokens, this.plain, this.note);
    this.texts = { content: this.addText(this.plain) };
    this.openBlock();
  }

  addText(parent) {
    const text = document.createTextNode("");
    const holder = element("div", "text");
    holder.append(text);
    parent.append(holder);
    return text;
  }

  openBlock() {
    this.block = element("div", "block");
    this.inBlock = 0;
    this.tokens.append(this.block);
  }

  openReasoning() {
    const details = element("details", "reasoning");
    details.append(element("summary", "", "Reasoning"));
    this.plain.prepend(details);
    return this.addText(details);
  }

  take(chunk, now) {
    if (chunk.metrics) this.meter.settle(chunk.metrics);
    for (const choice of chunk.choices ?? []) {
      if (choice.tokens?.length) {
        this.meter.add(choice.tokens, now);
        for (const token of choice.tokens) this.pending.push(token);
      }
      const delta = choice.delta ?? { content: choice.text };
      const reasoning = delta.reasoning ?? delta.reasoning_content;
      if (reasoning) (this.texts.reasoning ??= this.openReasoning()).appendData(reasoning);
      if (delta.content) this.texts.content.appendData(delta.content);
      this.content += delta.content ?? "";
      this.ending = ENDINGS[choice.finish_reason] ?? this.ending;
    }
  }

  paint() {
    for (const token of this.pending) {
      if (token.text === "") continue; // part of a character that a later token completes
      this.raw += token.text;
      const words = token.text.trimStart(); // the space before a word is not underlined: it may end a line
      this.block.append(token.text.slice(0, token.text.length - words.length));
      if (words) this.block.append(element("span", token.drafted ? "drafted" : "own", words));
      this.inBlock += 1;
      if (this.inBlock >= BLOCK && token.text.endsWith("\n")) this.openBlock();
    }
    this.pending = [];
  }

  finish() {
    this.paint();
    if (this.meter.sentAt === null) this.ending = "not run";
    const { count, mean, length, first } = this.meter;
    const parts = count ? [`${count} tokens`, `${digits(mean)} tokens/s`] : [];
    if (Number.isFinite(length)) parts.push(`${digits(length)} tokens a round`);
    if (Number.isFinite(first)) parts.push(`first token after ${milliseconds(first)}`);
    this.note.textContent = [...parts, ...(this.ending ? [this.ending] : [])].join(" · ");
  }

  fail(message, offer) {
    const problem = element("p", "problem", message);
    problem.setAttribute("role", "alert");
    if (offer) problem.append(offer);
    this.note.before(problem);
  }

  /** Whether the end of the text is in view: then the view follows it. */
  inView() {
    const { top, bottom } = this.note.getBoundingClientRect();
    const view = $("talk").getBoundingClientRect();
    return top < view.bottom + 40 && bottom > view.top;
  }
}

// ---- Painting, once a frame

function schedule() {
  state.frame ||= requestAnimationFrame(paint);
}

function paint() {
  state.frame = 0;
  const follow = state.current?.inView();
  for (const answer of state.shown) answer.paint();
  const now = performance.now();
  if (!state.current || now - state.readoutAt >= READOUT_EVERY) showReadout(now);
  if (follow) state.current.note.scrollIntoView({ block: "nearest" });
  if (state.current) schedule(); // the speed falls while nothing comes
}

function showReadout(now) {
  state.readoutAt = now;
  const pair = state.shown.length > 1;
  showGauge(now);
  document.documentElement.toggleAttribute("data-pair", pair);
  state.shown.forEach(({ meter }, column) => {
    $(`mean-${column}`).textContent = digits(meter.mean);
    $(`first-${column}`).textContent = milliseconds(meter.first);
    $(`length-${column}`).textContent = meter.speculative ? digits(meter.length) : meter.count ? "1" : "–";
    $(`count-${column}`).textContent = meter.count || "–";
  });
  showHistogram(state.shown[0]?.meter.histogram ?? []);
}

/** The large number: the speed now while an answer comes, then the mean. */
function showGauge(now) {
  const answer = state.current ?? state.shown[0];
  const speed = state.current ? answer.meter.now(now) : answer?.meter.mean;
  $("now").textContent = Number.isFinite(speed) ? digits(speed) : "0";
  const unit = state.current ? "tokens/s now" : answer ? "tokens/s, mean" : "tokens/s";
  $("now-unit").textContent = state.shown.length > 1 ? `${unit}, ${answer.title.toLowerCase()}` : unit;
}

function showHistogram(histogram) {
  const body = $("histogram").tBodies[0];
  while (body.rows.length > histogram.length) body.deleteRow(-1);
  const most = Math.max(...histogram, 1);
  for (let accepted = 0; accepted < histogram.length; accepted++) {
    const row = body.rows[accepted] ?? addBar(body, accepted);
    row.cells[1].firstChild.style.setProperty("--share", histogram[accepted] / most);
    row.cells[2].textContent = histogram[accepted];
  }
  $("no-rounds").hidden = histogram.length > 0;
}

function addBar(body, accepted) {
  const row = body.insertRow();
  const head = element("th", "", String(accepted));
  head.scope = "row";
  row.append(head);
  row.insertCell().append(element("div", "bar"));
  row.insertCell();
  return row;
}

/** Both speeds are known: say the ratio, and whether the texts are the same. */
function showVerdict([drafted, alone]) {
  let same = 0;
  while (same < drafted.raw.length && drafted.raw[same] === alone.raw[same]) same += 1;
  const equal = drafted.raw === alone.raw;
  $("ratio").textContent = `${digits(drafted.meter.mean / alone.meter.mean)}×`;
  $("same").textContent = `the speed, ${equal ? "same text" : `texts differ after ${same} characters`}`;
  $("verdict").hidden = false;
}

// ---- Sending

const mode = () => document.querySelector("input[name=mode]:checked").value;
const say = (words) => ($("status").textContent = words);

function setMode(value) {
  document.querySelector(`input[name=mode][value=${value}]`).checked = true;
  $("prompt-label").textContent = value === "chat" ? "Message" : "Text to continue";
}

function requestBody(prompt) {
  const body = {
    model: $("model").value || undefined,
    stream: true,
    stream_options: { include_usage: true },
    return_token_sources: true,
  };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"])
    if ($(name).value !== "") body[name] = Number($(name).value);
  if (mode() === "complete") return { max_tokens: COMPLETION_TOKENS, ...body, prompt };
  const system = $("system").value.trim() ? [{ role: "system", content: $("system").value }] : [];
  body.messages = [...system, ...state.messages, { role: "user", content: prompt }];
  if ($("thinking").value) body.chat_template_kwargs = { enable_thinking: $("thinking").value === "on" };
  return body;
}

async function generate(answer, path, body, signal) {
  const attempt = () => {
    answer.meter.start(performance.now());
    return call(path, { method: "POST", body: JSON.stringify(body), signal });
  };
  const response = await whenReady(attempt, signal);
  say(`Generating, ${answer.title.toLowerCase()}.`);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Failure(wordsOf(chunk.error) ?? "The server reported an error without words.");
    answer.take(chunk, performance.now());
  }
  throw new Failure("The connection ended before the answer did.");
}

function addTurn(prompt, answers) {
  const turn = element("section", answers.length > 1 ? "turn pair" : "turn");
  const columns = element("div", "answers");
  columns.append(...answers.map((answer) => answer.element));
  turn.append(element("h2", "who", mode() === "chat" ? "You" : "Prompt"), element("div", "prompt", prompt), columns);
  $("welcome").hidden = true;
  $("verdict").hidden = true;
  $("talk").append(turn);
}

/** Runs the prompt, and then, when compared, once more without the drafter: each has the machine for itself. */
async function send(prompt) {
  const { messages } = state;
  const chat = mode() === "chat";
  const body = requestBody(prompt);
  const titles = $("compare").checked ? ["With the drafter", "Without the drafter"] : ["Answer"];
  if (titles.length > 1) body.seed ??= crypto.getRandomValues(new Uint32Array(1))[0]; // the same noise for both
  const answers = titles.map((title, index) => new Answer(title, index === 0));
  const controller = new AbortController();
  Object.assign(state, { shown: answers, controller });
  addTurn(prompt, answers);
  setRunning(true);
  const path = chat ? "v1/chat/completions" : "v1/completions";
  await run(answers, path, body, controller.signal);
  if (state.controller !== controller) return; // a new chat began meanwhile
  settle(answers);
  if (chat && answers[0].content)
    messages.push({ role: "user", content: prompt }, { role: "assistant", content: answers[0].content });
  else if (!answers[0].meter.count && !$("prompt").value) $("prompt").value = prompt; // to try again
}

async function run(answers, path, body, signal) {
  for (const answer of answers) {
    state.current = answer;
    answer.note.scrollIntoView({ block: "nearest" });
    schedule();
    try {
      await generate(answer, path, { ...body, speculation: answer.meter.speculative }, signal);
      answer.complete = true;
    } catch (error) {
      return report(error, answer, signal);
    }
  }
  say("Done.");
}

function settle(answers) {
  const last = state.current;
  const follow = last.inView();
  state.current = state.controller = null;
  for (const answer of answers) answer.finish();
  setRunning(false);
  paint();
  if (follow) last.note.scrollIntoView({ block: "nearest" });
  if (answers.length > 1 && answers.every((answer) => answer.complete)) showVerdict(answers);
}

function report(error, answer, signal) {
  if (signal.aborted) {
    answer.ending = "stopped";
    return say("Stopped.");
  }
  const message = error instanceof Failure ? error.message : "The connection broke while the answer came.";
  if (answer.meter.count) answer.ending = "incomplete";
  answer.fail(message, error.status === 400 && /chat template/i.test(message) ? completeInstead() : null);
  say("");
  if (error.status === 401) askForKey(message);
}

function completeInstead() {
  const button = element("button", "", "Switch to Complete");
  button.type = "button";
  button.addEventListener("click", () => (setMode("complete"), $("prompt").focus()));
  return button;
}

function setRunning(running) {
  $("go").textContent = running ? "Stop" : "Send";
  $("talk").setAttribute("aria-busy", running);
}

// ---- Settings

function askForKey(message) {
  $("key-needed").textContent = `This server needs an API key: ${message}`;
  $("key-needed").hidden = false;
  if (!$("settings").open) $("settings").showModal();
  $("api_key").focus();
}

/** Asks for the models, and chooses to complete where the model cannot chat. */
async function connect() {
  try {
    const response = await whenReady(() => call("v1/models"));
    state.models = (await response.json()).data;
    $("model").replaceChildren(...state.models.map(({ id }) => new Option(id, id)));
    $("key-needed").hidden = true;
    chooseModel();
  } catch (error) {
    if (error.status === 401) askForKey(error.message);
    else say(error.message);
  }
}

function chooseModel() {
  const model = state.models.find(({ id }) => id === $("model").value);
  $("model-name").textContent = model?.id ?? "";
  const completes = model?.chat_template === false;
  setMode(completes ? "complete" : "chat");
  say(completes ? "This model has no chat template: it completes text." : "");
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
  keep("localStorage", "theme", theme);
}

function setColours(on) {
  document.documentElement.dataset.colours = on ? "on" : "off";
  $("colours").checked = on;
  keep("localStorage", "colours", on ? "on" : "off");
}

function stop() {
  state.controller?.abort();
}

function newChat() {
  stop();
  Object.assign(state, { messages: [], shown: [], current: null, controller: null });
  for (const turn of document.querySelectorAll(".turn")) turn.remove();
  $("welcome").hidden = false;
  $("verdict").hidden = true;
  setRunning(false);
  say("");
  showReadout(performance.now());
  $("prompt").focus();
}

function onGo() {
  const prompt = $("prompt").value;
  if (state.controller || !prompt.trim()) return;
  $("prompt").value = "";
  send(prompt);
}

function bind() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (state.controller) stop();
    else onGo();
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    onGo();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !$("settings").open) stop();
  });
  $("new").addEventListener("click", newChat);
  $("mode").addEventListener("change", () => setMode(mode()));
  $("theme").addEventListener("click", () => {
    const themes = ["auto", "light", "dark"];
    setTheme(themes[(themes.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % 3]);
  });
  $("colours").addEventListener("change", (event) => setColours(event.target.checked));
  $("model").addEventListener("change", chooseModel);
  bindSettings();
}

function bindSettings() {
  for (const name of KEPT) {
    $(name).value = recall("localStorage", name);
    $(name).addEventListener("change", () => keep("localStorage", name, $(name).value));
  }
  $("api_key").value = recall("sessionStorage", "api_key");
  $("api_key").addEventListener("change", () => {
    keep("sessionStorage", "api_key", $("api_key").value.trim());
    connect();
  });
  $("open-settings").addEventListener("click", () => $("settings").showModal());
}

bind();
setTheme(recall("localStorage", "theme") || "auto");
setColours(recall("localStorage", "colours") !== "off");
const narrow = matchMedia("(max-width: 52rem)");
const fold = () => ($("more").open = !narrow.matches);
narrow.addEventListener("change", fold);
fold();
if (matchMedia("(hover: hover)").matches) $("prompt").focus();
connect();
