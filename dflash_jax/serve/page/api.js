// The server: requests, waiting until the engine is up, and streams of events.

import { recall, say } from "./dom.js";

export class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export const wordsOf = (error) => (typeof error === "string" ? error : error?.message);

async function failureOf(response) {
  const words = await response.json().then((body) => wordsOf(body.error), () => "");
  return new Failure(words || `The server answered ${response.status} ${response.statusText}.`, response.status);
}

export async function call(path, options = {}) {
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
export async function whenReady(attempt, signal) {
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
export async function* events(body) {
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
