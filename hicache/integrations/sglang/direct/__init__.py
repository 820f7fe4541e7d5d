"""Device pools straight to L3: SGLang's external linker, less what only its own class can be.

Nothing in here imports SGLang but `assemble`.
"""
