"""The names under which vLLM finds Forebay's classes."""

CONNECTOR = "ForebayConnector"
CONNECTOR_MODULE = "forebay.vllm.connector"
SPEC = "ForebaySpec"
SPEC_MODULE = "forebay.vllm.spec"
