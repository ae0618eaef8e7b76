// Drives npm's openai and ai with two tools, streamed: node drive_tools.mjs CLIENT URL FOLDER. Prints one line of JSON.
import { createRequire } from "node:module";

const [client, baseURL, folder] = process.argv.slice(2);
const fetched = createRequire(`${folder}/package.json`);
const [apiKey, model] = ["none", "smol"];
const question = "What is the weather in Ulm, and what time is it?";
const called = [];
const parameters = {
  get_weather: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  get_time: { type: "object", properties: {} },
};
const names = Object.keys(parameters);

function call(name, given) {
  called.push([name, given]);
  return `result of ${name}`;
}

async function chats() {
  const tools = names.map((name) => ({
    type: "function",
    function: { name, parameters: parameters[name], parse: JSON.parse, function: (given) => call(name, given) },
  }));
  const messages = [{ role: "user", content: question }];
  const { default: OpenAI } = fetched("openai");
  return new OpenAI({ baseURL, apiKey }).chat.completions.runTools({ model, messages, tools, stream: true }).finalContent();
}

async function responses() {
  const { default: OpenAI } = fetched("openai");
  const tools = names.map((name) => ({ type: "function", name, parameters: parameters[name] }));
  const input = [{ role: "user", content: question }];
  while (true) {
    const response = await new OpenAI({ baseURL, apiKey }).responses.stream({ model, input, tools }).finalResponse();
    const calls = response.output.filter((item) => item.type === "function_call");
    if (!calls.length) return response.output_text;
    const output = (item) => call(item.name, JSON.parse(item.arguments));
    const results = calls.map((item) => ({ type: "function_call_output", call_id: item.call_id, output: output(item) }));
    input.push(...response.output, ...results);
  }
}

async function ai(provider, store = false) {
  const { streamText, isStepCount, jsonSchema, tool } = fetched("ai");
  const made = (name) =>
    tool({ inputSchema: jsonSchema(parameters[name]), execute: async (given) => call(name, given) });
  const tools = Object.fromEntries(names.map((name) => [name, made(name)]));
  const onError = ({ error }) => console.error(error);
  const providerOptions = { openai: { store } }; // with a store it refers to items of earlier answers
  const asked = { prompt: question, tools, stopWhen: isStepCount(3), providerOptions, onError };
  return streamText({ model: provider(model), ...asked }).text;
}

const compatible = () => fetched("@ai-sdk/openai-compatible").createOpenAICompatible({ name: "inflight", baseURL, apiKey });
const openai = () => fetched("@ai-sdk/openai").createOpenAI({ baseURL, apiKey });
const clients = {
  openai: chats,
  "openai-responses": responses,
  "ai-openai-compatible": () => ai(compatible()),
  "ai-openai": () => ai(openai()),
  "ai-openai-stored": () => ai(openai(), true),
  "ai-openai-chat": () => ai(openai().chat),
};
const answer = await clients[client]();
console.log(JSON.stringify({ called: called.sort(), answer }));
