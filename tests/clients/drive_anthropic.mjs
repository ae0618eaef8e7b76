// Drives Anthropic's client for TypeScript: node drive_anthropic.mjs FOLDER URL MODEL. Prints one line of JSON.
import { createRequire } from "node:module";

const [folder, baseURL, model] = process.argv.slice(2);
const { default: Anthropic } = createRequire(`${folder}/package.json`)("@anthropic-ai/sdk");
const client = new Anthropic({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const asked = { model, max_tokens: 100, messages };
const tools = [{ name: "add", input_schema: { type: "object", properties: { a: { type: "integer" } } } }];

const whole = await client.messages.create(asked);
const stream = client.messages.stream(asked);
const pieces = [];
stream.on("text", (text) => pieces.push(text));
const streamed = await stream.finalMessage();
const call = await client.messages.stream({ ...asked, tools }).finalMessage();
const use = call.content.find((block) => block.type === "tool_use");
const results = [{ type: "tool_result", tool_use_id: use.id, content: "3" }];
const turns = [...messages, { role: "assistant", content: call.content }, { role: "user", content: results }];
const answer = await client.messages.create({ ...asked, tools, messages: turns });
console.log(
  JSON.stringify({
    whole: whole.content,
    streamed: streamed.content,
    pieces: pieces.length,
    stops: [whole, streamed, call, answer].map((message) => message.stop_reason),
    use,
    answer: answer.content,
  }),
);
