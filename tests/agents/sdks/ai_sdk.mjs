// The AI SDK over either of OpenAI's APIs: a tool that is called, its result, and the text behind it.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [api, baseURL, how] = process.argv.slice(2);
const models = {
  chat: () => createOpenAICompatible({ name: "local", baseURL, includeUsage: true })("m"),
  responses: () => createOpenAI({ baseURL, apiKey: "none" })("m"),
};
const calls = [];
const weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => (calls.push(city), `It rains in ${city}.`),
});
const options = {
  model: models[api](),
  prompt: "How is the weather in Oslo?",
  tools: { weather },
  stopWhen: stepCountIs(3),
  maxRetries: 0,
  providerOptions: { openai: { store: false } },
};
const result = how === "streamed" ? streamText(options) : await generateText(options);
const text = await result.text;
const usage = await result.totalUsage;
console.log(JSON.stringify({ text, calls, cached: usage.cachedInputTokens }));
