"""The manager: owners bring labelled text by OpenAI's API, and get models that are served; without torch."""
