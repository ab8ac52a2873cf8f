// One answer: where its tokens came from, how fast they came, and how it is shown.
// What the model says enters the page as text nodes only.

import { $, digits, element, milliseconds } from "./dom.js";

const SPEED_WINDOW = 1000; // ms that "tokens/s now" looks back
const BLOCK = 200; // tokens after which a line break starts a new block: layout stays local in long answers

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

const ENDINGS = { length: "ended at the token limit", abort: "aborted by the server", error: "ended by an error" };

export class Answer {
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
