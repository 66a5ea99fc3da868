"""The asyncio side: links, their lanes and transfers, connecting and serving."""
