"""The four transports: HTTP and gRPC, blocking and asyncio. They send requests and raise the client's errors.

Those of a protocol share their calls, as coroutines. A blocking transport blocks in them.
"""
