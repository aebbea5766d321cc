-- wrk: POST a 1 KB generation request; print one JSON line at the end.
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '{"text": "' .. string.rep("x", 900) .. '", "sampling_params": {"max_new_tokens": 16}}'
done = function(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format('{"requests": %d, "seconds": %.3f, "p50_ms": %.4f, "p99_ms": %.4f, "errors": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    errors.status + errors.connect + errors.read + errors.write + errors.timeout))
end
