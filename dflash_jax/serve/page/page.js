// Chat or complete with the served model, and see where every token came from.

import { Answer } from "./answer.js";
import { call, events, Failure, whenReady, wordsOf } from "./api.js";
import { $, digits, element, keep, milliseconds, recall, say } from "./dom.js";

const KEPT = ["temperature", "top_p", "max_tokens", "seed", "thinking", "system"];
const COMPLETION_TOKENS = 256; // the API's own default of 16 is too few to see anything
const READOUT_EVERY = 120; // ms; digits that change faster cannot be read

const state = {
  messages: [], // of this chat, as the API takes them
  models: [],
  shown: [], // the answers of the last turn: with the drafter and, when compared, without it
  current: null, // the one that grows
  controller: null, // aborts what runs
  frame: 0,
  readoutAt: 0,
};

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
